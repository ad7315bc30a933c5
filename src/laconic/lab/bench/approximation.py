"""Table 1 of Dettmers' 8-bit paper, measured again with this package's four 8-bit codecs.

Called by `laconic bench approximation`. The paper: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016,
arXiv:1511.04561: 25 million random numbers from each of four distributions, mean absolute and mean relative error of
each type. The normalisation of the paper is kept (all samples are one tensor; errors are summed in chunks, in float64),
and the normalisation by blocks that is this package's default is measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from laconic import codecs
from laconic.errors import BadInput
from laconic.lab.bench.codec_speed import mean_errors
from laconic.lab.environment import environment

PAPER_SAMPLES = 25_000_000
CAUTION = (
    "Caution: some absolute errors printed in the paper lie below what any 8-bit code can reach (256 levels on U(0,1) "
    "cannot average less than 1/1024 ≈ 0.00098), so its relative errors are the ones to compare with."
)


# What is sampled: U(0, 1) without a deviation, else N(0, deviation²).
DISTRIBUTIONS = {"U(0,1)": None, "N(0,1)": 1.0, "N(0,10²)": 10.0, "N(0,0.2²)": 0.2}
TYPES = ("dynamic8", "linear8", "mantissa8", "static8")

# Table 1 of the paper: (mean absolute error, mean relative error) per distribution and type.
PAPER: dict[tuple[str, str], tuple[float, float]] = {
    ("U(0,1)", "dynamic8"): (0.00004, 0.0139),
    ("U(0,1)", "linear8"): (0.0024, 0.0216),
    ("U(0,1)", "mantissa8"): (0.0017, 0.0722),
    ("U(0,1)", "static8"): (0.0007, 0.0482),
    ("N(0,1)", "dynamic8"): (0.0005, 0.0246),
    ("N(0,1)", "linear8"): (0.0004, 0.0647),
    ("N(0,1)", "mantissa8"): (0.0104, 0.0689),
    ("N(0,1)", "static8"): (0.0093, 0.063),
    ("N(0,10²)", "dynamic8"): (0.049, 0.0249),
    ("N(0,10²)", "linear8"): (0.041, 0.0644),
    ("N(0,10²)", "mantissa8"): (1.066, 0.0719),
    ("N(0,10²)", "static8"): (0.926, 0.0628),
    ("N(0,0.2²)", "dynamic8"): (0.000018, 0.0245),
    ("N(0,0.2²)", "linear8"): (0.000015, 0.0615),
    ("N(0,0.2²)", "mantissa8"): (0.00055, 0.0826),
    ("N(0,0.2²)", "static8"): (0.00022, 0.0658),
}


def specs(kind: str, distribution: str) -> dict[str, str]:
    """The two ways each 8-bit type is measured: as in the paper, and with this package's defaults.

    In the paper `dynamic8` and `linear8` are normalised by the whole tensor's largest magnitude, `mantissa8` and
    `static8` by an exponent offset, here of 10 (of 100 for N(0,10²), whose values would not fit).

    >>> specs("dynamic8", "N(0,1)")
    {'paper': 'dynamic8(none)', 'default': 'dynamic8'}
    """
    if kind in ("dynamic8", "linear8"):
        return {"paper": f"{kind}(none)", "default": kind}
    return {"paper": f"{kind}(offset={2 if distribution == 'N(0,10²)' else 1})", "default": kind}


def run(
    samples: int = PAPER_SAMPLES, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Measure every distribution and type; returns the JSON-ready record.

    Each distribution has the next seed. `progress` is called with (distributions done, distributions in all).

    Raises:
        BadInput: samples below 1.

    >>> record = run(1000)
    >>> len(record["results"])
    32
    """
    if samples < 1:
        raise BadInput(f"samples must be at least 1, got {samples}")
    results: list[dict[str, Any]] = []
    for done, (distribution, deviation) in enumerate(DISTRIBUTIONS.items()):
        generator = torch.Generator().manual_seed(seed + done)
        draw = torch.rand if deviation is None else torch.randn
        x = draw(samples, generator=generator).mul_(deviation or 1.0)
        decoded = torch.empty_like(x)
        for kind in TYPES:
            for normalisation, spec in specs(kind, distribution).items():
                codec = codecs.codec(spec)
                codec.decode(codec.encode(x), samples, out=decoded)
                relative, absolute = mean_errors(x, decoded)
                paper_absolute, paper_relative = PAPER[distribution, kind]
                results.append({
                    "distribution": distribution, "type": kind, "codec": str(codec), "normalisation": normalisation,
                    "mean_abs_error": absolute, "mean_rel_error": relative, "paper_mean_abs_error": paper_absolute,
                    "paper_mean_rel_error": paper_relative, "rel_error_over_paper": relative / paper_relative,
                })  # fmt: skip
        if progress is not None:
            progress(done + 1, len(DISTRIBUTIONS))
    return {
        "results": results,
        "caution": CAUTION,
        "configuration": {"samples": samples, "seed": seed},
        "environment": environment(),
    }


def write_plot(record: dict[str, Any], path: Path) -> None:
    """Write the record of `run` as a self-contained HTML page: both errors, ours beside the paper's.

    Raises:
        BadInput: the file cannot be written.
    """
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    titles = ("Mean relative error, %", "Mean absolute error (log scale)")
    figure = make_subplots(rows=2, cols=1, subplot_titles=titles, vertical_spacing=0.16)
    rows = record["results"]
    whole = [row for row in rows if row["normalisation"] == "paper"]
    default = [row for row in rows if row["normalisation"] == "default"]
    series = (
        ("paper", whole, "paper_mean_", "#9aa5b1"),
        ("Laconic, scaled as in the paper", whole, "mean_", "#1f6feb"),
        ("Laconic, default (a scale per block)", default, "mean_", "#2da44e"),
    )
    for label, chosen, prefix, colour in series:
        axis = [[row["distribution"] for row in chosen], [row["type"] for row in chosen]]
        for position, (error, factor) in enumerate((("rel_error", 100.0), ("abs_error", 1.0)), start=1):
            bar = graph_objects.Bar(
                name=label,
                x=axis,
                y=[factor * row[f"{prefix}{error}"] for row in chosen],
                marker_color=colour,
                legendgroup=label,
                showlegend=position == 1,
            )
            figure.add_trace(bar, row=position, col=1)
    samples = record["configuration"]["samples"]
    figure.update_layout(
        title=f"8-bit approximations: {samples:,} samples per distribution, beside Table 1 of arXiv:1511.04561",
        barmode="group",
        template="plotly_white",
        height=900,
        legend={"orientation": "h", "y": 1.07},
        margin={"b": 110, "t": 150},
    )
    figure.update_yaxes(type="log", row=2, col=1)
    figure.add_annotation(
        text=record["caution"].replace(", so", ",<br>so"), xref="paper", yref="paper", x=0, y=-0.14, showarrow=False,
        align="left", font={"size": 12, "color": "#57606a"},
    )  # fmt: skip
    try:
        figure.write_html(path, include_plotlyjs=True)
    except OSError as error:
        raise BadInput(f"cannot write the plot to {path}: {error.strerror}") from error
