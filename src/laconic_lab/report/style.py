"""The look of the report and of its charts: two schemes, eight series that differ in colour, dash and marker.

Colours follow Okabe and Ito's palette for colour-blind readers, darkened on white and lightened on black until every
line has a contrast of 3:1 or more with the page. No colour carries a meaning that a word, a dash or a shape does not.
"""

from __future__ import annotations

from importlib.resources import files

LIGHT = {
    "page": "#fbfbf9", "panel": "#ffffff", "ink": "#1b1c1a", "muted": "#5f605b", "line": "#dcdbd4", "grid": "#e8e7e1",
    "bad": "#b3261e", "bad-page": "#fdf0ee", "good": "#00694d", "good-page": "#edf6f1", "unsure": "#7a5600",
    "unsure-page": "#fbf4e2", "link": "#005a8c",
    "s0": "#3a3b38", "s1": "#0072b2", "s2": "#c44e00", "s3": "#00805d", "s4": "#a8518a", "s5": "#946200",
    "s6": "#3f7fa8", "s7": "#7a4b3a",
    "compute": "#4f6d8f", "encode": "#c98a00", "wire": "#c44e00", "wait": "#8e8d86", "decode": "#00805d",
    "other": "#b9b8b0",
}  # fmt: skip
DARK = {
    "page": "#131416", "panel": "#1a1c1f", "ink": "#e8e7e3", "muted": "#a3a29c", "line": "#34373c", "grid": "#272a2e",
    "bad": "#ff9d92", "bad-page": "#35191a", "good": "#6fd3ae", "good-page": "#12281f", "unsure": "#e5bd62",
    "unsure-page": "#2c2413", "link": "#7cc4ee",
    "s0": "#d6d5d0", "s1": "#56b4e9", "s2": "#f5884f", "s3": "#33c79a", "s4": "#e39cc6", "s5": "#e6b23c",
    "s6": "#a7c7e0", "s7": "#cf9e8a",
    "compute": "#7f9fc4", "encode": "#e6b23c", "wire": "#f5884f", "wait": "#85847d", "decode": "#33c79a",
    "other": "#55544e",
}  # fmt: skip
SERIES = 8
DASHES = (
    "solid", (0, (3.2, 1.4)), (0, (1.0, 1.4)), (0, (4.5, 1.4, 1.0, 1.4)), (0, (2.3, 1.0, 0.5, 1.0, 0.5, 1.0)),
    (0, (5.5, 1.8)), (0, (1.8, 1.8)), (0, (0.5, 1.0)),
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "h", "p", "8")
PARTS = ("compute", "encode", "wire", "wait", "decode", "other")


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


def colours() -> str:
    """Both schemes as custom properties; paper is light."""
    light, dark = _variables(LIGHT), _variables(DARK)
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"@media print{{:root{{{light}}}}}\n"
    )


def chart_style() -> str:
    """What a chart needs, in the page or alone."""
    return colours() + _sheet("chart.css")


def page_style() -> str:
    """The whole style sheet of the report."""
    return chart_style() + _sheet("page.css")


def _sheet(name: str) -> str:
    return files("laconic_lab.report").joinpath(name).read_text(encoding="utf-8")
