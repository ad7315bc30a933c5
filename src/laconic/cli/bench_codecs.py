"""`laconic bench codecs` and `laconic bench approximation`: the codecs' speed and their errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from laconic.cli.run_options import Json
from laconic.cli.tables import echo_json, echo_table
from laconic.lab.bench import approximation as approximation_lab
from laconic.lab.bench import codec_speed


def codecs(
    numel: Annotated[int, typer.Option(help="Elements of the tensor.")] = codec_speed.TARGET_NUMEL,
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed repeats, after one untimed.")] = 9,
    codec: Annotated[list[str] | None, typer.Option(help="A codec spec; repeat it for more. Default: all.")] = None,
    peers: Annotated[bool, typer.Option(help="Measure other packages too.")] = True,
    json: Json = False,
) -> None:
    """Time every codec beside memcpy and its peers, on N(0,1) values."""
    with _progress("codecs", quiet=json) as progress:
        record = codec_speed.run(
            codec or None, numel=numel, threads=threads, repeats=repeats, peers=peers, progress=progress
        )
    if json:
        echo_json(record)
        return
    headings = ["codec", *codec_speed.OPERATIONS, "bits", "mean rel. error", "mean abs. error"]
    echo_table(headings, [_codec_cells(row) for row in [*record["results"], *record["peers"]]])
    typer.echo(f"ns per element (multiple of memcpy); memcpy of {numel:,} floats: {record['memcpy_ns']:.3f} ns")
    for sentence in codec_speed.missed_targets(record) if numel >= codec_speed.TARGET_NUMEL else ():
        typer.echo(f"target missed: {sentence}")


def approximation(
    samples: Annotated[int, typer.Option(help="Values per distribution.")] = approximation_lab.PAPER_SAMPLES,
    plot: Annotated[Path, typer.Option(help="Where the HTML plot is written.")] = Path("approximation.html"),
    json: Json = False,
) -> None:
    """Measure the four 8-bit types' errors beside Table 1 of their paper."""
    with _progress("distributions", quiet=json) as progress:
        record = approximation_lab.run(samples, progress=progress)
    approximation_lab.write_plot(record, plot)
    if json:
        echo_json({**record, "plot": str(plot)})
        return
    headings = ["distribution", "codec", "rel. error %", "paper's", "abs. error", "paper's"]
    echo_table(headings, [_approximation_cells(row) for row in record["results"]])
    typer.echo(record["caution"])
    typer.echo(f"plot: {plot}")


def _codec_cells(row: dict[str, Any]) -> list[str]:
    if "codec" not in row and "encode_ns" not in row:
        return [row["peer"], row.get("error", "not installed"), *[""] * 6]
    times = []
    for operation in codec_speed.OPERATIONS:
        if f"{operation}_ns" not in row:
            times.append("")
            continue
        ratio, target = row[f"{operation}_ratio"], row.get(f"{operation}_target")
        goal = "" if target is None else f" ≤ {target:g}×" if ratio <= target else f" > {target:g}×"
        times.append(f"{row[f'{operation}_ns']:.3f} ({ratio:.2f}×{goal})")
    errors = [f"{row[key]:.3g}" if key in row else "" for key in ("mean_rel_error", "mean_abs_error")]
    return [row.get("codec") or f"peer: {row['peer']}", *times, f"{row['bits_per_element']:.3f}", *errors]


def _approximation_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["distribution"],
        row["codec"],
        f"{100 * row['mean_rel_error']:.2f}",
        f"{100 * row['paper_mean_rel_error']:.2f}",
        f"{row['mean_abs_error']:.2g}",
        f"{row['paper_mean_abs_error']:.2g}",
    ]


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error when it is a terminal; nothing otherwise."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
