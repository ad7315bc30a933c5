"""`laconic code classify | map | coarsen`, `laconic bench code`: tasks, each beside all of its controls."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.code import Prelude, Standard
from laconic.cli.shared import Json, count_option, echo_json, echo_table, progress_bar
from laconic.comprehension import analogies, archives, coarsening, corpus, device_mapping, poj, speed
from laconic.comprehension import classify as classes
from laconic.comprehension.embedding import Embedding
from laconic.comprehension.ir import Dialect
from laconic.comprehension.networks import Fitting
from laconic.comprehension.programs import TREES, own_embedding, random_vectors
from laconic.errors import UnknownName
from laconic.lab.environment import environment

Platform = Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated. Default: all.")]
Seed = Annotated[int, count_option("Of the embedding and the classifiers.", least=0)]
Trees = Annotated[int, count_option("Of each forest.")]
Cache = Annotated[
    Path | None, typer.Option(help="Keep compiled programs and predictions in this folder; go on from it.")
]
Epochs = Annotated[int, count_option("Train the networks, too, for so many epochs.", "--networks", least=0)]
TASKS = ("analogies", "skip-gram", "device mapping", "thread coarsening", "classification")


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
    _echo(device_mapping.run(platforms, seed, trees, _tell, _fitting(epochs, seed), cache, kinds), json)


def coarsen(platform: Platform = None, seed: Seed = 204, json: Json = False) -> None:
    """Predict by which factor to coarsen the threads of kernels, leaving one kernel out at a time."""
    _echo(coarsening.run(platform or tuple(coarsening.PUBLISHED), seed, _tell), json)


def classify(
    folder: Annotated[Path, typer.Argument(help="A folder with a folder of programs for each class.")],
    folds: Annotated[int, typer.Option(help="Parts that are predicted from the others.")] = 5,
    seed: Seed = 0,
    trees: Trees = TREES,
    epochs: Epochs = 0,
    cache: Cache = None,
    prelude: Prelude = None,
    standard: Standard = "",
    json: Json = False,
) -> None:
    """Learn the classes of programs in folders; report accuracies with intervals, and a confusion matrix."""
    how = classes.Setting(folds, seed, trees, cache, Dialect(prelude, standard), _fitting(epochs, seed))
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


def code(
    task: Annotated[list[str] | None, typer.Option(help=f"Only this one: {', '.join(TASKS)}. Default: all.")] = None,
    per_class: Annotated[int, typer.Option(help="Programs of each class of POJ-104, at most 500.")] = 100,
    method: Annotated[list[str] | None, typer.Option(help="Classify by this one only; may be repeated.")] = None,
    folds: Annotated[int, typer.Option(help="Of the classification.")] = 5,
    seed: Seed = 204,
    trees: Trees = TREES,
    epochs: Epochs = 0,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Run the tasks on code, beside controls and published figures: the record of docs/code.md."""
    fitting = _fitting(epochs, seed)
    how = classes.Setting(folds, seed, trees, cache, methods=tuple(method or ()), fitting=fitting)
    run: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "analogies": lambda: _analogies(per_class, seed, cache),
        "skip-gram": speed.run,
        "device mapping": lambda: device_mapping.run(seed=seed, trees=trees, tell=_tell, fitting=fitting, cache=cache),
        "thread coarsening": lambda: coarsening.run(seed=seed, tell=_tell),
        "classification": lambda: _classification(per_class, how),
    }
    results: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for name in task or TASKS:
        if name not in run:
            raise UnknownName("task", name, TASKS)
        begin = time.perf_counter()
        results += run[name]()
        seconds[name] = time.perf_counter() - begin
    if json:
        options = {"per_class": per_class, "folds": folds, "seed": seed, "trees": trees, "network_epochs": epochs}
        return echo_json({"environment": environment(), "options": options, "seconds": seconds, "results": results})
    return _echo(results, json=False)


def _fitting(epochs: int, seed: int) -> Fitting | None:
    return Fitting(epochs=epochs, seed=seed) if epochs else None


def _analogies(per_class: int, seed: int, cache: Path | None) -> list[dict[str, Any]]:
    """Of the published embedding, and of one that is trained on POJ-104 and the kernels of both tasks."""
    with tempfile.TemporaryDirectory() as temporary, progress_bar("programs", quiet=False) as progress:
        folder, dialect = poj.unpack(cache or Path(temporary), per_class)
        graphs = list(corpus.read_all(corpus.find_files([folder]), cache, progress, dialect).graphs)
    for task in ("Device_Mapping", "Thread_Coarsening"):
        graphs += device_mapping.read_kernels(task, _tell, cache)[0].values()
    own = own_embedding(graphs, seed, dim=200, epochs=5, folder=cache)
    random = Embedding(own.vocabulary, random_vectors(len(own.vocabulary), own.vectors.shape[1], seed))
    asked = {"published embedding": archives.published(), "embedding": own, "random embedding": random}
    statements = [graph.abstracted for graph in graphs]
    return [{**row, "method": method, "vocabulary": len(found.vocabulary), "programs": len(graphs),
             "unknown_share": found.unknown_share(statements)}
            for method, found in asked.items() for row in _asked(found)]  # fmt: skip


def _asked(found: Embedding) -> list[dict[str, Any]]:
    rows = [("analogies", row["part"], row["correct"] / max(row["questions"], 1), row["questions"],
             {"accuracy": row["published"][0] / row["published"][1], "questions": row["published"][1]})
            for row in analogies.analogies(found)]  # fmt: skip
    rows += [("distances", row["category"], row["percent"] / 100, row["statements"],
              {"accuracy": row["published"] / 100}) for row in analogies.distances(found)]  # fmt: skip
    return [{"task": task, "platform": part, "folds": "", "accuracy": share, "speedup": None, "questions": asked,
             "published": published} for task, part, share, asked, published in rows]  # fmt: skip


def _classification(per_class: int, how: classes.Setting) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder, dialect = poj.unpack(how.cache or Path(temporary), per_class)
        with progress_bar("programs, then epochs", quiet=False) as progress:
            record = classes.run(folder, replace(how, dialect=dialect, cache=how.cache or Path(temporary)), progress)
    about = {"programs": record["programs"], "skipped": len(record["skipped"]), "twins": record["twins"],
             "vocabulary": record["vocabulary"]}  # fmt: skip
    return [{**row, "speedup": None, **about} for row in record["results"]]


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _echo(results: list[dict[str, Any]], json: bool) -> None:
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
