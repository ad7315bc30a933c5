"""How small models ship: files of trained networks, coders on the same symbols, and layers of few weights."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.shrink import coders, running, vgg16
from benchmarks.shrink import networks as lab
from benchmarks.shrink.deep_compression import BESIDE, PAPER, beside
from laconic.cli.shared import Json, amount_option, count_option, echo_json, echo_table
from laconic.errors import UnknownName
from laconic.shrinking.file import Reader
from laconic.shrinking.report import HEADINGS, Report, report

PARTS = ("networks", "running", "vgg16")
NETWORKS = ", ".join(lab.NETWORKS)


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; repeat it. Default: all.")] = None,
    network: Annotated[list[str] | None, typer.Option(help=f"{NETWORKS}; default: all but digits-mlp.")] = None,
    seeds: Annotated[int, count_option("Trainings of each network.")] = 5,
    first: Annotated[int, count_option("The first seed.", least=0)] = 0,
    goals: Annotated[int | None, count_option("The first so many files of each network; default: all.")] = None,
    threads: Annotated[int, count_option("Of torch and the coders.")] = 1,
    scale: Annotated[float, amount_option("Share of VGG-16's rows.", most=1)] = 1.0,
    folder: Annotated[Path | None, typer.Option(help="Keeps what was trained; it goes on there.")] = None,
    json: Json = False,
) -> None:
    """Measure how small networks ship, how quickly symbols are coded and how quickly few weights run."""
    torch.set_num_threads(threads)
    for name in part or ():
        if name not in PARTS:
            raise UnknownName("part of the benchmark", name, PARTS)
    chosen = part or PARTS
    results: list[dict[str, Any]] = []
    coded: list[dict[str, Any]] = []
    loading: list[dict[str, Any]] = []
    for name in (network or lab.STANDARD) if "networks" in chosen else ():
        for seed in range(first, first + seeds):
            made = list(lab.train_and_shrink(name, seed, lambda line: typer.echo(line, err=True), folder, goals))
            results += [each.row for each in made]
            if seed == first:
                coded += _compared(name, seed, made, quiet=json)
    for spread in (True, False) if "vgg16" in chosen else ():
        rows, loads = _vgg16(spread, scale, threads, quiet=json)
        coded += rows
        loading += loads
    ran = list(running.running()) if "running" in chosen else []
    summary = lab.summarise(results)
    if json:
        return echo_json(lab.record(results=results, summary=summary, coders=coded, loading=loading, running=ran))
    _show(summary, coded, loading, ran)


def _compared(name: str, seed: int, made: list[lab.Made], *, quiet: bool) -> list[dict[str, Any]]:
    """Coders on the symbols of every goal, and on the dense weights without loss; tables beside the paper's."""
    found = []
    for each in made:
        rows = coders.coders(coders.symbols_of(each.shrunk.parts))
        coders.whole_files(each.shrunk.parts, rows)
        of = f"{name}, seed {seed}, {each.row['density']:.1%} kept"
        found += [{"symbols_of": of, **row} for row in rows]
        if not quiet:
            _echo_layers(each.shrunk.report(), name)
            errors = ", ".join(f"{start} {100 * error:.2f} %" for start, error in each.row["start_errors"].items())
            typer.echo(f"error after sharing, by the start of k-means, before tuning: {errors}")
    if not quiet and name in PAPER:
        paper = PAPER[name]
        typer.echo(f"Deep Compression: {paper.error:.2f} % error, {paper.dense_error:.2f} % dense")
    without_loss = coders.lossless(made[0].dense)
    return found + [{"symbols_of": f"{name}, seed {seed}, float32", **row} for row in without_loss]


def _vgg16(
    spread: bool, scale: float, threads: int, *, quiet: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Coders on VGG-16's symbols; where they are all there and spread, its file and how it loads, too."""
    parts = vgg16.drawn(spread, scale)
    of = f"vgg16, published densities, places {'spread' if spread else 'at random'}, drawn"
    coded = coders.coders(coders.symbols_of(parts), repeats=1)
    loading: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vgg16.lac"
        wrote = vgg16.written(parts, path)
        if scale == 1.0:
            loading = [{"file": of, **wrote, **row} for row in vgg16.loaded(path, threads)]
        if not quiet and spread:
            _echo_layers(report(Reader(path)), "vgg16")
    coders.whole_files(parts, coded)
    return [{"symbols_of": of, **row} for row in coded], loading


def _show(
    summary: list[dict[str, Any]], coded: list[dict[str, Any]], loading: list[dict[str, Any]], ran: list[dict[str, Any]]
) -> None:
    """All that is not printed layer by layer."""
    _echo(
        ["network", "kept", "seeds", "ratio", "dense error", "error", "rise", "95 % bound", "no loss"],
        [[row["network"], f"{row['goal_density']:.1%}", str(row["seeds"]), f"{row['ratio']:.1f}×",
          *[f"{100 * row[key]:.2f} %" for key in ("dense_error", "shrunk_error", "rise")],
          "" if row["rise_upper_95"] is None else f"{100 * row['rise_upper_95']:.2f} %", str(row["no_loss"] or "")]
         for row in summary],
    )  # fmt: skip
    _echo(
        ["symbols of", "coder", "bytes", "whole file", "encode Msym/s", "decode Msym/s"],
        [[row["symbols_of"], row["coder"], f"{row['nbytes']:,}", f"{row['file_nbytes']:,}" if "file_nbytes" in row
          else "", f"{row['encode_msym_s']:.1f}", f"{row['decode_msym_s']:.1f}"] for row in coded], left=["coder"],
    )  # fmt: skip
    _echo(
        ["file", "sparse", "bytes", "encode s", "load s", "threads", "peak over dense"],
        [[row["file"], row["sparse"], f"{row['file_nbytes']:,}", f"{row['encode_s']:.2f}", f"{row['load_s']:.2f}",
          str(row["threads"]), f"{row['peak_over_dense']:.2f}"] for row in loading], left=["sparse"],
    )  # fmt: skip
    ways = ("dense", "laconic", "torch.sparse")
    _echo(
        ["size", "samples", *[f"{name} ms" for name in ways], "speed-up"],
        [[str(row["size"]), str(row["batch"]), *[f"{row[f'{name}_ms']:.3f}" for name in ways], f"{row['speedup']:.2f}"]
         for row in ran],
    )  # fmt: skip
    if ran:
        typer.echo(f"geometric mean of speed-ups: {statistics.geometric_mean(row['speedup'] for row in ran):.2f}")


def _echo(headings: list[str], rows: list[list[str]], left: Sequence[str] = ()) -> None:
    """A table, unless it has no rows: its part was not asked for."""
    if rows:
        echo_table(headings, rows, left=left)


def _echo_layers(found: Report, network: str) -> None:
    """A network's table, with the paper's columns where the paper has the network."""
    known = network in PAPER
    echo_table(BESIDE if known else HEADINGS, beside(found, network) if known else found.table())
