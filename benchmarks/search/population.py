"""Population-based training against the same epochs without exchange: its toy problem, and a network on real digits.

Caller: `search.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.search.methods_on_tables import mean
from laconic.searching.api import search
from laconic.searching.trial import Trial
from laconic.statistics import sign_permutation
from laconic.storage.checkpoints import CheckpointFiles
from laconic.workloads import get
from laconic.workloads.workload import Task
from laconic_lab.runs.trainer import begin_with
from laconic_lab.searches.training import HeldOut

QUADRATIC = "h0 = float(0, 1); h1 = float(0, 1)"
WORKLOAD = "digits-mlp"
RATES = "learning_rate = log(0.0000001, 10); momentum = float(0, 0.99)"  # nobody knows where it lies
MEMBERS, EPOCHS, STRETCH = 8, 30, 3
DIVERGED = 1000.0  # the loss of a model that is beyond it, or not a number
STEPS = 2  # of a stretch of the toy; with ten, some members have no time left to find both parameters


def quadratic(trial: Trial) -> float:
    """Two steps on what is believed, Q̂ = 1.2 − h·θ², from the parent's θ or from (0.9, 0.9); judged by 1.2 − θ².

    Source: Jaderberg et al., Population Based Training of Neural Networks, 2017, Fig. 2.
    """
    before = trial.weights()
    theta = np.array([0.9, 0.9] if before is None else before["theta"])
    h = np.array([trial.params["h0"], trial.params["h1"]])
    for _ in range(STEPS):
        theta = theta - 0.01 * 2 * h * theta
    trial.keep({"theta": theta.tolist()})
    return float(1.2 - (theta**2).sum())


def toy(repeats: int = 10, stretches: int = 100) -> list[dict[str, Any]]:
    """PBT with two members from h = (1, 0) and (0, 1), beside the same two without any exchange."""
    start = ({"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0})
    with tempfile.TemporaryDirectory() as folder:
        bests = [
            search(quadratic, QUADRATIC, "pbt(2, share=0.5)", 2 * stretches, start=start, seed=seed,
                   folder=Path(folder) / str(seed)).value for seed in range(repeats)
        ]  # fmt: skip
    steps = STEPS * stretches
    alone = max(1.2 - 0.81 * sum((1 - 0.02 * point[name]) ** (2 * steps) for name in point) for point in start)
    same = {"space": "quadratic", "evaluations": 2 * stretches, "optimum": 1.2}
    return [
        {**same, "method": "pbt(2, share=0.5)", "repeats": repeats, **mean(bests), "bests": bests},
        {**same, "method": "grid, no exchange", "repeats": 1, "best_mean": alone},
    ]


def trained(trial: Trial, epochs: int) -> float:
    """So many epochs of SGD by the trial's rate and momentum, from its parent's weights; minus the loss held out.

    Not the accuracy: on few images it ties, and a member with a rate near nothing keeps its parent's luck for ever.
    """
    task, before = _task(), trial.weights()
    model = task.workload.build(trial.seed)
    if before is not None:
        begin_with(model, before)
    optimizer = torch.optim.SGD(model.parameters(), trial.params["learning_rate"], trial.params["momentum"])
    generation = trial.number  # of the order of samples: another for each stretch
    for epoch in range(epochs):
        for step in range(task.steps_per_epoch()):
            optimizer.zero_grad()
            task.loss(model, task.batch(generation * epochs + epoch, step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    trial.used(epochs * len(task.data.train))
    trial.keep(model.state_dict())
    loss = task.evaluate(model)["loss"]
    return -loss if loss < DIVERGED else -DIVERGED


def stretch(trial: Trial) -> float:
    """A member's next epochs."""
    return trained(trial, STRETCH)


def whole(trial: Trial) -> float:
    """A training from its beginning to its end."""
    return trained(trial, EPOCHS)


def digits(repeats: int, first: int = 0) -> list[dict[str, Any]]:
    """PBT beside random search with as many epochs: 8 members or draws of 30 epochs, judged on test data at the end."""
    torch.set_num_threads(1)
    population, draws = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + repeats):
            here = Path(folder) / str(seed)
            found = search(stretch, RATES, f"pbt({MEMBERS})", MEMBERS * EPOCHS // STRETCH, seed=seed, folder=here / "p")
            population.append(_tested(here / "p", found.best.number if found.best else 0))
            found = search(whole, RATES, "random", MEMBERS, seed=seed, folder=here / "r")
            draws.append(_tested(here / "r", found.best.number if found.best else 0))
    p_value = sign_permutation([a - b for a, b in zip(population, draws, strict=True)])
    same = {"space": f"{WORKLOAD}, {RATES}", "epochs": MEMBERS * EPOCHS, "repeats": repeats, "first_seed": first}
    test = {"test": "permutation of the signs of paired differences, two-sided", "p_value": p_value}
    return [
        {**same, "method": f"pbt({MEMBERS})", "evaluations": MEMBERS * EPOCHS // STRETCH, **mean(population),
         "deviation": float(np.std(population, ddof=1)), "bests": population, **test},
        {**same, "method": "random", "evaluations": MEMBERS, **mean(draws),
         "deviation": float(np.std(draws, ddof=1)), "bests": draws},
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _task() -> Task:
    workload = get(WORKLOAD)
    return HeldOut(**{name: getattr(workload, name) for name in workload.__dataclass_fields__}).prepare(0)


def _tested(folder: Path, number: int) -> float:
    """The accuracy on test data, which the search has not seen, of what its best trial kept."""
    task = get(WORKLOAD).prepare(0)
    weights: Mapping[str, Any] = CheckpointFiles(folder / "weights").read(number)
    begin_with(task.model, dict(weights))
    return task.evaluate(task.model)["accuracy"]
