"""`laconic bench shrink`: files of trained networks, coders on the same symbols, and layers of few weights."""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import torch
import typer

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.errors import UnknownName
from laconic.lab.bench import shrink as lab
from laconic.shrink.report import HEADINGS
from laconic.workloads import get

PARTS = ("coders", "networks", "running", "vgg16")


def shrink(
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; repeat it. Default: all.")] = None,
    network: Annotated[list[str] | None, typer.Option(help=f"{', '.join(lab.NETWORKS)}; default: LeNets.")] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each network.")] = 5,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    threads: Annotated[int, typer.Option(help="Of torch and the coders.")] = 1,
    scale: Annotated[float, typer.Option(help="Share of VGG-16's rows.")] = 1.0,
    json: Json = False,
) -> None:
    """Measure how small networks ship, how quickly symbols are coded and how quickly few weights run."""
    torch.set_num_threads(threads)
    for name in part or ():
        if name not in PARTS:
            raise UnknownName("part of the benchmark", name, PARTS)
    chosen = part or PARTS
    results: list[dict[str, Any]] = []
    for name in (network or ["lenet-300-100", "lenet-5"]) if "networks" in chosen else ():
        for seed in range(first, first + seeds):
            for row, report in lab.train_and_shrink(name, seed, lambda line: typer.echo(line, err=True)):
                results.append(row)
                if not json and seed == first:
                    echo_table(HEADINGS, report.table())
                    typer.echo(f"Deep Compression: {row['paper']}")
    coded = [{"symbols_of": "lenet-300-100, untrained", **row} for row in _small()] if "coders" in chosen else []
    if "coders" in chosen:
        coded += [{"symbols_of": "lenet, untrained, float32", **row} for row in lab.lossless(_lenet())]
    for spread in (True, False) if "vgg16" in chosen else ():
        made = {name: (symbols, levels) for name, symbols, levels in lab.vgg16_symbols(spread, scale)}
        of = f"vgg16, published densities, places {'spread' if spread else 'at random'}, drawn"
        coded += [{"symbols_of": of, **row} for row in lab.coders(made, repeats=1)]
    ran = list(lab.running()) if "running" in chosen else []
    if json:
        return echo_json(lab.record(results, coded, ran))
    echo_table(
        ["symbols of", "coder", "bytes", "encode Msym/s", "decode Msym/s"],
        [[row["symbols_of"], row["coder"], f"{row['nbytes']:,}", f"{row['encode_msym_s']:.1f}",
          f"{row['decode_msym_s']:.1f}"] for row in coded], left=["coder"],
    )  # fmt: skip
    ways = ("dense", "laconic", "torch.sparse")
    echo_table(
        ["size", "samples", *[f"{name} ms" for name in ways], "speed-up"],
        [[str(row["size"]), str(row["batch"]), *[f"{row[f'{name}_ms']:.3f}" for name in ways], f"{row['speedup']:.2f}"]
         for row in ran],
    )  # fmt: skip
    if ran:
        typer.echo(f"geometric mean of speed-ups: {statistics.geometric_mean(row['speedup'] for row in ran):.2f}")


def _lenet() -> dict[str, torch.Tensor]:
    return dict(get("mnist-lenet").build(0).state_dict())


def _small() -> list[dict[str, Any]]:
    """Coders on a LeNet-300-100 as it starts, pruned: nothing need be trained to compare their speed."""
    return lab.coders(lab.symbols_of(get("mnist-300-100").build(0), 0.08, 5))
