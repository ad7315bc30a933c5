"""`laconic code classify | map | coarsen`, `laconic bench code`: tasks, each beside all of its controls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.comprehension import analogies, archives, coarsening, device_mapping
from laconic.comprehension import classify as classes
from laconic.comprehension.programs import TREES
from laconic.lab.environment import environment

Platform = Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated. Default: all.")]
Seed = Annotated[int, typer.Option(help="Of the embedding and the forest.")]
Trees = Annotated[int, typer.Option(help="Of each forest.")]


def map_(platform: Platform = None, seed: Seed = 204, trees: Trees = TREES, json: Json = False) -> None:
    """Predict whether kernels run faster on CPU or GPU, on the paper's folds and on folds grouped by kernel."""
    _echo(device_mapping.run(platform or device_mapping.PLATFORMS, seed, trees, _tell), json)


def coarsen(platform: Platform = None, seed: Seed = 204, trees: Trees = TREES, json: Json = False) -> None:
    """Predict by which factor to coarsen the threads of kernels, leaving one kernel out at a time."""
    _echo(coarsening.run(platform or tuple(coarsening.PUBLISHED), seed, trees, _tell), json)


def classify(
    folder: Annotated[Path, typer.Argument(help="A folder with a folder of programs for each class.")],
    folds: Annotated[int, typer.Option(help="Parts that are predicted from the others.")] = 5,
    seed: Seed = 0,
    trees: Trees = TREES,
    cache: Annotated[Path | None, typer.Option(help="Keep compiled programs in this folder; go on from it.")] = None,
    json: Json = False,
) -> None:
    """Learn the classes of programs in folders; report accuracies with intervals, and a confusion matrix."""
    record = classes.run(folder, folds, seed, trees, cache)
    if json:
        return echo_json(record)
    for path, reason in record["skipped"]:
        typer.echo(f"skipped {path}: {reason}", err=True)
    rows = [[row["method"], f"{100 * row['accuracy']:.2f} %", " – ".join(f"{100 * end:.1f}" for end in row["interval"])]
            for row in record["results"]]  # fmt: skip
    echo_table(("method", "accuracy", "95 % interval"), rows)
    typer.echo(f"{record['programs']} programs, {len(record['skipped'])} skipped; confusion by {classes.METHOD}:")
    lines = [[name, *map(str, line)] for name, line in zip(record["classes"], record["confusion"], strict=True)]
    echo_table(("true \\ predicted", *record["classes"]), lines)
    return None


def code(
    folder: Annotated[Path | None, typer.Option("--classify", help="Classify this folder's programs, too.")] = None,
    seed: Seed = 204,
    trees: Trees = TREES,
    json: Json = False,
) -> None:
    """Run every task on code: analogies, device mapping, thread coarsening; beside controls and published figures."""
    results: list[dict[str, Any]] = [
        {"task": "analogies", "platform": row["part"], "method": "published embedding", "folds": "",
         "accuracy": row["correct"] / max(row["questions"], 1), "speedup": None, "questions": row["questions"],
         "published": {"accuracy": row["published"][0] / row["published"][1], "questions": row["published"][1]}}
        for row in analogies.analogies(archives.published())
    ]  # fmt: skip
    results += device_mapping.run(seed=seed, trees=trees, tell=_tell)
    results += coarsening.run(seed=seed, trees=trees, tell=_tell)
    if folder is not None:
        results += [{**row, "speedup": None} for row in classes.run(folder, seed=seed, trees=trees)["results"]]
    if json:
        return echo_json({"environment": environment(), "seed": seed, "trees": trees, "results": results})
    return _echo(results, json=False)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _echo(results: list[dict[str, Any]], json: bool) -> None:
    if json:
        return echo_json({"results": results})
    rows = [[row["task"], row["platform"], row["method"], row["folds"], f"{100 * row['accuracy']:.2f} %",
             _number(row.get("speedup")), _number(row.get("oracle_speedup")), _published(row["published"])]
            for row in results]  # fmt: skip
    headings = ("task", "platform", "method", "folds", "accuracy", "speed-up", "oracle", "published")
    echo_table(headings, rows, left=("platform", "method", "folds"))
    return None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _published(found: dict[str, float]) -> str:
    accuracy = [f"{100 * found['accuracy']:.2f} %"] if "accuracy" in found else []
    return ", ".join([*accuracy, *([f"{found['speedup']:g}"] if "speedup" in found else [])])
