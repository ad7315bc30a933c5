"""`laconic code classify | map | coarsen`: tasks, each beside all of its controls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, count_option, echo_json, echo_table, progress_bar
from laconic_code import classify as classes
from laconic_code import coarsening, device_mapping
from laconic_code.commands.embeddings import Prelude, Standard
from laconic_code.ir import Dialect
from laconic_code.networks import Fitting
from laconic_code.programs import TREES

Platform = Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated. Default: all.")]
Seed = Annotated[int, count_option("Seed of the embedding and the classifiers.", least=0)]
Trees = Annotated[int, count_option("Trees of each forest.")]
Cache = Annotated[
    Path | None, typer.Option(help="Keep compiled programs and predictions in this folder, and resume from it.")
]
Epochs = Annotated[int, count_option("Also train the networks, for this many epochs.", "--networks", least=0)]


def map_(
    platform: Platform = None,
    folds: Annotated[list[str] | None, typer.Option(help="Only these, paper or grouped. Default: both.")] = None,
    seed: Seed = 204,
    trees: Trees = TREES,
    epochs: Epochs = 0,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Predict whether kernels run faster on CPU or GPU, on the paper's folds and on folds grouped by kernel."""
    platforms = platform or device_mapping.PLATFORMS
    kinds = folds or tuple(device_mapping.FOLDS)
    echo_results(device_mapping.run(platforms, seed, trees, tell, fitting_for(epochs, seed), cache, kinds), json)


def coarsen(platform: Platform = None, seed: Seed = 204, json: Json = False) -> None:
    """Predict the best thread-coarsening factor of each kernel from all other kernels."""
    echo_results(coarsening.run(platform or tuple(coarsening.PUBLISHED), seed, tell), json)


def classify(
    folder: Annotated[Path, typer.Argument(help="A folder with one folder of programs per class.")],
    folds: Annotated[int, typer.Option(help="Number of folds of cross-validation.")] = 5,
    seed: Seed = 0,
    trees: Trees = TREES,
    epochs: Epochs = 0,
    cache: Cache = None,
    prelude: Prelude = None,
    std: Standard = "",
    json: Json = False,
) -> None:
    """Classify the programs in folders; report accuracies with intervals, and a confusion matrix."""
    how = classes.ClassificationSpec(folds, seed, trees, cache, Dialect(prelude, std), fitting_for(epochs, seed))
    with progress_bar("programs, then epochs", quiet=json) as progress:
        record = classes.run(folder, how, progress)
    if json:
        return echo_json(record)
    for path, reason in record["skipped"]:
        typer.echo(f"skipped {path}: {reason}", err=True)
    rows = [[row["method"], f"{100 * row['accuracy']:.2f} %", " – ".join(f"{100 * end:.1f}" for end in row["interval"]),
             "" if row["unknown_share"] is None else f"{100 * row['unknown_share']:.1f} %"]
            for row in record["results"]]  # fmt: skip
    echo_table(("method", "accuracy", "95 % interval", "unknown statements"), rows)
    typer.echo(
        f"{record['programs']} programs, {len(record['skipped'])} skipped; {100 * record['twins']:.1f} % have a twin "
        f"in another fold; confusion by {classes.METHOD}:"
    )
    lines = [[name, *map(str, line)] for name, line in zip(record["classes"], record["confusion"], strict=True)]
    echo_table(("true \\ predicted", *record["classes"]), lines)
    return None


def fitting_for(epochs: int, seed: int) -> Fitting | None:
    """How the networks are trained, if they are."""
    return Fitting(epochs=epochs, seed=seed) if epochs else None


def tell(line: str) -> None:
    """Print what is going on where it does not mix with the record."""
    typer.echo(line, err=True)


def echo_results(results: list[dict[str, Any]], json: bool) -> None:
    """Print the rows of one or several tasks, as a table or as JSON."""
    if json:
        return echo_json({"results": results})
    rows = [[row["task"], row["platform"], row["method"], row["folds"], _share(row["accuracy"]),
             _number(row.get("speedup")), _number(row.get("oracle_speedup")), _published(row["published"])]
            for row in results]  # fmt: skip
    headings = ("task", "platform", "method", "folds", "accuracy", "speed-up", "oracle", "published")
    echo_table(headings, rows, left=("platform", "method", "folds"))
    return None


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _published(found: dict[str, float]) -> str:
    accuracy = [f"{100 * found['accuracy']:.2f} %"] if "accuracy" in found else []
    return ", ".join([*accuracy, *([f"{found['speedup']:g}"] if "speedup" in found else [])])
