"""`laconic code map | coarsen`: tasks on measured kernels, each beside all of its controls."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.comprehension import coarsening, device_mapping
from laconic.comprehension.programs import TREES

Platform = Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated. Default: all.")]
Seed = Annotated[int, typer.Option(help="Of the embedding and the forest.")]
Trees = Annotated[int, typer.Option(help="Of each forest.")]


def map_(platform: Platform = None, seed: Seed = 204, trees: Trees = TREES, json: Json = False) -> None:
    """Predict whether kernels run faster on CPU or GPU, on the paper's folds and on folds grouped by kernel."""
    _echo(device_mapping.run(platform or device_mapping.PLATFORMS, seed, trees, _tell), json)


def coarsen(platform: Platform = None, seed: Seed = 204, trees: Trees = TREES, json: Json = False) -> None:
    """Predict by which factor to coarsen the threads of kernels, leaving one kernel out at a time."""
    _echo(coarsening.run(platform or tuple(coarsening.PUBLISHED), seed, trees, _tell), json)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _echo(results: list[dict[str, Any]], json: bool) -> None:
    if json:
        return echo_json({"results": results})
    rows = [[row["platform"], row["method"], row["folds"], f"{100 * row['accuracy']:.2f} %", f"{row['speedup']:.3f}",
             f"{row['oracle_speedup']:.3f}", _published(row["published"])] for row in results]  # fmt: skip
    headings = ("platform", "method", "folds", "accuracy", "speed-up", "oracle", "published")
    echo_table(headings, rows, left=("method", "folds"))
    return None


def _published(found: dict[str, float]) -> str:
    accuracy = f"{100 * found['accuracy']:.2f} %, " if "accuracy" in found else ""
    return f"{accuracy}{found['speedup']}"
