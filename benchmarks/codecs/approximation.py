"""Table 1 of Dettmers' 8-bit paper, measured again with this package's four 8-bit codecs.

The paper: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, arXiv:1511.04561: 25 million random numbers
from each of four distributions, mean absolute and mean relative error of each type. The normalisation of the paper is
kept (all samples are one tensor; errors are summed in chunks, in float64), and the normalisation by blocks that is this
package's default is measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from laconic import codecs
from laconic.cli.shared import Json, echo_json, echo_table, progress_bar
from laconic.errors import BadInput
from laconic_lab.bench.codec_speed import mean_errors
from laconic_lab.environment import environment

if TYPE_CHECKING:
    from laconic_lab.report.canvas import Canvas, Size

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
    """Write the record of `run` as an HTML page that opens offline: both errors, ours beside the paper's.

    Raises:
        BadInput: the file cannot be written.
    """
    from laconic_lab.report.canvas import NARROW, WIDE  # matplotlib
    from laconic_lab.report.templating import document

    titles = {"rel_error": "Mean relative error, %", "abs_error": "Mean absolute error (logarithmic)"}
    drawn = {
        title: "".join(_bars(record, error, title, size).svg() for size in (WIDE, NARROW))
        for error, title in titles.items()
    }
    sections = [(title.split()[1], title, f"<figure>{svg}</figure>") for title, svg in drawn.items()]
    samples = record["configuration"]["samples"]
    page = document("8-bit approximations beside Table 1 of arXiv:1511.04561", "codecs",
                    f"<p class='meta'>{samples:,} samples per distribution</p>", sections,
                    f"<footer><p>{record['caution']}</p></footer>")  # fmt: skip
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the plot to {path}: {error.strerror}") from error


def _bars(record: dict[str, Any], error: str, title: str, size: Size) -> Canvas:
    """A group of bars for each distribution and type: the paper's, ours scaled as there, ours."""
    from matplotlib.patches import Patch

    from laconic_lab.report.canvas import Canvas

    whole = [row for row in record["results"] if row["normalisation"] == "paper"]
    default = [row for row in record["results"] if row["normalisation"] == "default"]
    series = (("paper", whole, "paper_mean_", 0), ("Laconic, scaled as in the paper", whole, "mean_", 1),
              ("Laconic, default (a scale per block)", default, "mean_", 3))  # fmt: skip
    canvas = Canvas(size, title)
    top = canvas.legend([(Patch(color=canvas.series_colour(style)), label) for label, _, _, style in series])
    canvas.resize(top + 28.0 * len(whole) + 30)
    axes = canvas.axes(130, top, size.width - 18, canvas.height - 24)
    axes.set(ylim=(len(whole) - 0.4, -0.6), xscale="log" if error == "abs_error" else "linear")
    factor = 100.0 if error == "rel_error" else 1.0
    for place, (label, rows, prefix, style) in enumerate(series):
        values = [factor * row[f"{prefix}{error}"] for row in rows]
        heights = [number + 0.26 * (place - 1) for number in range(len(rows))]
        for bar, row, value in zip(axes.barh(heights, values, 0.24, color=canvas.series_colour(style)), rows, values,
                                   strict=True):  # fmt: skip
            canvas.tip(bar, "bar", f"{label}, {row['distribution']}, {row['type']}: {value:.3g}")
    canvas.ticks(axes.yaxis, range(len(whole)), [f"{row['distribution']} {row['type']}" for row in whole], grid=False)
    places = [place for place in axes.get_xticks() if axes.get_xlim()[0] <= place <= axes.get_xlim()[1]]
    canvas.ticks(axes.xaxis, places, [f"{place:g}" for place in places])
    return canvas


def main(
    samples: Annotated[int, typer.Option(help="Values per distribution.")] = PAPER_SAMPLES,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this HTML file.")] = None,
    json: Json = False,
) -> None:
    """Measure the four 8-bit types' errors beside Table 1 of their paper."""
    with progress_bar("distributions", quiet=json) as progress:
        record = run(samples, progress=progress)
    if plot is not None:
        write_plot(record, plot)
        record["plot"] = str(plot)
    if json:
        return echo_json(record)
    echo_table(
        ["distribution", "codec", "rel. error %", "paper's", "abs. error", "paper's"],
        [
            [row["distribution"], row["codec"], f"{100 * row['mean_rel_error']:.2f}",
             f"{100 * row['paper_mean_rel_error']:.2f}", f"{row['mean_abs_error']:.2g}",
             f"{row['paper_mean_abs_error']:.2g}"]
            for row in record["results"]
        ],
    )  # fmt: skip
    typer.echo(record["caution"])
    if plot is not None:
        typer.echo(f"plot: {plot}")
