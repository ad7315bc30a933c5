"""`laconic demo`: the first thing to run."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from laconic.cli.compare import show
from laconic.cli.run_options import RUNS, Json, Runs, TrialWorkers, show_warnings_as_sentences
from laconic.lab.runs import demo as settings
from laconic.lab.runs.compare import compare
from laconic.lab.runs.progress import say
from laconic.lab.runs.spec import RunSpec
from laconic.workloads import Changes


def demo(
    workers: TrialWorkers = 4,
    seeds: Annotated[int, typer.Option(help="Trials of each configuration.")] = settings.SEEDS,
    epochs: Annotated[int, typer.Option(help="Epochs of each trial.")] = settings.EPOCHS,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Compare DDP with Laconic's codecs on real digits: over emulated 100 Mbit/s links as root, else on loopback."""
    show_warnings_as_sentences()
    link, sentence = settings.find_link(workers)
    say(f"training {settings.WORKLOAD} by {', '.join(settings.CONFIGS)}, {seeds} seeds each, on {sentence}")
    words = ["laconic", "compare", settings.WORKLOAD, "-n", str(workers), "--configs", ",".join(settings.CONFIGS)]
    words += ["--seeds", str(seeds), "--epochs", str(epochs), *(["--link", link] if link else [])]
    spec = RunSpec(settings.WORKLOAD, workers, settings.CONFIGS, range(seeds), changes=Changes(epochs), link=link,
                   runs=runs, command=shlex.join(words))  # fmt: skip
    record, folder = compare(spec, note=say)
    show(record, folder, json=json)
    if any(trial.failed is not None for trial in record.trials):
        raise typer.Exit(1)
