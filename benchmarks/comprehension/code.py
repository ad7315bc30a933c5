"""Run the tasks on code, beside controls and published figures: the record of docs/research/code.md.

    python -m benchmarks code --task "device mapping" --json
    LACONIC_DATA=… python -m benchmarks code --task classification --per-class 100 --cache DIR --json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.comprehension import poj, skipgram_speed
from laconic.cli.shared import Json, echo_json, progress_bar
from laconic.errors import UnknownName
from laconic_code import analogies, archives, coarsening, corpus, device_mapping
from laconic_code import classify as classes
from laconic_code.commands.tasks import Cache, Epochs, Seed, Trees, echo_results, fitting_for, tell
from laconic_code.embedding import Embedding
from laconic_code.programs import TREES, own_embedding, random_vectors
from laconic_lab.environment import environment

TASKS = ("analogies", "skip-gram", "device mapping", "thread coarsening", "classification")


def main(
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
    """Run the tasks on code, beside controls and published figures: the record of docs/research/code.md."""
    fitting = fitting_for(epochs, seed)
    how = classes.ClassificationSpec(folds, seed, trees, cache, methods=tuple(method or ()), fitting=fitting)
    run: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "analogies": lambda: _analogies(per_class, seed, cache),
        "skip-gram": skipgram_speed.run,
        "device mapping": lambda: device_mapping.run(seed=seed, trees=trees, tell=tell, fitting=fitting, cache=cache),
        "thread coarsening": lambda: coarsening.run(seed=seed, tell=tell),
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
    return echo_results(results, json=False)


def _analogies(per_class: int, seed: int, cache: Path | None) -> list[dict[str, Any]]:
    """Of the published embedding, and of one that is trained on POJ-104 and the kernels of both tasks."""
    with tempfile.TemporaryDirectory() as temporary, progress_bar("programs", quiet=False) as progress:
        folder, dialect = poj.unpack(cache or Path(temporary), per_class)
        graphs = list(corpus.read_all(corpus.find_files([folder]), cache, progress, dialect).graphs)
    for task in ("Device_Mapping", "Thread_Coarsening"):
        graphs += device_mapping.read_kernels(task, tell, cache)[0].values()
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


def _classification(per_class: int, how: classes.ClassificationSpec) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder, dialect = poj.unpack(how.cache or Path(temporary), per_class)
        with progress_bar("programs, then epochs", quiet=False) as progress:
            record = classes.run(folder, replace(how, dialect=dialect, cache=how.cache or Path(temporary)), progress)
    about = {"programs": record["programs"], "skipped": len(record["skipped"]), "twins": record["twins"],
             "vocabulary": record["vocabulary"]}  # fmt: skip
    return [{**row, "speedup": None, **about} for row in record["results"]]
