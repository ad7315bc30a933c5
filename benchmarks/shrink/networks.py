"""How small networks ship: each is trained, pruned to one goal after the other, shared, written, loaded and judged.

Caller: `shrink.py`. Sizes are those of whole files. A goal goes on from the one before it. With a folder, every
training is kept when it has ended, and a benchmark that was interrupted goes on after it.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from laconic.errors import UnknownName
from laconic.shrinking.door import Shrunk, load_shrunk
from laconic.shrinking.parts import Part
from laconic.shrinking.plan import Plan
from laconic.shrinking.search import CANDIDATE
from laconic.shrinking.share import STARTS
from laconic.shrinking.training import TaskTraining, error_of
from laconic.storage.memo import Memo
from laconic.workloads import Task, get
from laconic.workloads.inputs import Pixels, ShiftedPixels
from laconic_lab.environment import environment

Say = Callable[[str], None]


@dataclass(frozen=True)
class Goal:
    """One file to make.

    Attributes:
        density: over all weights.
        bits: of values.
        retraining: epochs of each round of pruning.
        small_bits: of biases.
        bit_price: what a bit of the file may cost, see `Plan`.
    """

    density: float
    bits: int
    retraining: int
    small_bits: int = 6
    bit_price: float = 0.0

    def plan(self) -> Plan:
        """How values are shared."""
        return Plan(bits=self.bits, small_bits=self.small_bits, bit_price=self.bit_price)


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        workload: what is trained.
        epochs: of the first training.
        rounds: of pruning, before each goal.
        tuning: epochs of tuning values.
        rate: that a retraining starts with, over the workload's; tuning starts with all of it.
        goals: from the largest file to the smallest; each goes on from the one before.
        shifts: pixels by which images are shifted in training, dense or pruned; 0 leaves the workload's inputs.
    """

    workload: str
    epochs: int
    rounds: int
    tuning: int
    rate: float
    goals: tuple[Goal, ...]
    shifts: int = 0

    def prepared(self, seed: int) -> Task:
        """The workload with its model and data."""
        workload = get(self.workload)
        if self.shifts:
            workload = replace(workload, inputs=ShiftedPixels(Pixels(), 28, self.shifts, mirrored=False))
        return workload.prepare(seed)


NETWORKS = {
    "lenet-300-100": Network(
        "mnist-300-100", 12, 2, 3, 0.5, (Goal(0.06, 4, 4), Goal(0.03, 3, 4), Goal(0.018, 3, 4)), shifts=1,
    ),
    "lenet-5": Network(
        "mnist-lenet", 4, 1, 1, 1.0,
        (Goal(0.05, 4, 10, bit_price=2), Goal(0.018, 4, 3, bit_price=2), Goal(0.009, 4, 4, bit_price=2)), shifts=1,
    ),
    "cifar-cnn": Network(
        "cifar-cnn", 24, 1, 2, 1.0, (Goal(0.2, 5, 24, bit_price=1), Goal(0.08, 4, 24, bit_price=2)),
    ),
    "digits-mlp": Network("digits-mlp", 10, 2, 4, 0.5, (Goal(0.15, 4, 4), Goal(0.08, 3, 4))),
}  # fmt: skip
STANDARD = ("lenet-300-100", "lenet-5", "cifar-cnn")  # digits-mlp is for a look at what the benchmark does


@dataclass(frozen=True, eq=False)
class Made:
    """A goal that was reached: its row of the record, what its file holds, and the dense model's state."""

    row: dict[str, Any]
    shrunk: Shrunk
    dense: Mapping[str, Tensor]


def train_and_shrink(
    name: str, seed: int, say: Say, folder: Path | None = None, goals: int | None = None
) -> Iterator[Made]:
    """The goals of a network, one after the other; `goals` of them, or all.

    Raises:
        UnknownName: there is no such network here.
    """
    if name not in NETWORKS:
        raise UnknownName("network of the benchmark", name, NETWORKS)
    return _Training(name, seed, say, folder).goals(goals)


class _Training:
    """One network from one seed."""

    def __init__(self, name: str, seed: int, say: Say, folder: Path | None) -> None:
        self.name, self.seed, self.network = name, seed, NETWORKS[name]
        self._say: Say = lambda text: say(f"{name}, seed {seed}: {text}")
        self._folder = folder and folder / f"{name}-{seed}"
        self.task = self.network.prepared(seed)
        self.task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # LeNet trains 1.5 × as fast
        self.judge = error_of(self.task)

    def goals(self, count: int | None) -> Iterator[Made]:
        """Train, then prune to each goal and share; sharing changes nothing for the goals that follow."""
        model, of = self.task.model, self.network
        first = (of.workload, of.epochs, of.shifts, self.seed)
        dense = Memo(self._folder, repr(first), required=True).recall("dense", self._train_dense)
        model.load_state_dict(dense)
        dense_error, dense_wrong = self.judge(model), _wrong(self.task, model)
        self._say(f"dense error {100 * dense_error:.2f} %")
        before, calls = 1.0, 0
        for place, goal in enumerate(of.goals[:count]):
            way = [(each.density, each.retraining) for each in of.goals[: place + 1]]
            key = (*first, of.rounds, of.rate, way)
            memory = Memo(self._folder, repr(key), required=True)
            masks: dict[str, Tensor] = {}
            for turn in range(1, of.rounds + 1):
                density = goal.density * (before / goal.density) ** (1 - turn / of.rounds)
                calls += 1
                kept = memory.recall(f"pruned-{calls}", partial(self._prune, model, density, goal, calls))
                model.load_state_dict(kept["state"])
                masks = kept["masks"]
            before = goal.density
            memory = Memo(self._folder, repr((*key, of.tuning, goal)), required=True)
            parts, error = memory.recall(f"shared-{calls}", partial(self._share, model, masks, goal), CANDIDATE)
            shrunk = Shrunk(model, parts, Plan(density=goal.density, bits=goal.bits), dense_error, error)
            row = self._row(shrunk, goal, dense_wrong) | {"start_errors": self._starts(model, masks, goal)}
            self._say(f"{row['ratio']:.1f}× at {100 * row['shrunk_error']:.2f} %, {row['file_nbytes']:,} bytes")
            yield Made(row, shrunk, dense)

    def _train_dense(self) -> dict[str, Tensor]:
        TaskTraining(self.task, self.network.epochs, rate=1.0)(self.task.model)
        return dict(self.task.model.state_dict())

    def _prune(self, model: nn.Module, density: float, goal: Goal, calls: int) -> dict[str, Any]:
        """The model after a round of pruning to a density, which is changed, and its masks."""
        train = TaskTraining(self.task, goal.retraining, self.network.rate, calls=calls)
        masks = Plan(density=density, rounds=1).prune(model, train)
        self._say(f"pruned to {density:.1%}, error {100 * self.judge(model):.2f} %")
        return {"state": dict(model.state_dict()), "masks": masks}

    def _share(self, model: nn.Module, masks: Mapping[str, Tensor], goal: Goal) -> tuple[dict[str, Part], float]:
        small = deepcopy(model)
        train = TaskTraining(self.task, self.network.tuning, rate=1.0)
        parts = goal.plan().share_values(small, masks, train)
        return parts, self.judge(small)

    def _starts(self, model: nn.Module, masks: Mapping[str, Tensor], goal: Goal) -> dict[str, float]:
        """The error after sharing from each start of k-means, before values are tuned."""
        found = {}
        for start in STARTS:
            small = deepcopy(model)
            Plan(share=f"kmeans(start={start})", bits=goal.bits).share_values(small, masks, None)
            found[start] = self.judge(small)
        return found

    def _row(self, shrunk: Shrunk, goal: Goal, dense_wrong: Tensor) -> dict[str, Any]:
        """Write the file, load it into a plain model, and judge that."""
        with tempfile.TemporaryDirectory() as folder:
            nbytes = shrunk.save(Path(folder) / "a.lac")
            loaded = load_shrunk(Path(folder) / "a.lac", into=get(self.network.workload).build(0), sparse="never")
        report, wrong = shrunk.report(), _wrong(self.task, loaded)
        return {
            "network": self.name, "seed": self.seed, "dense_error": shrunk.dense_error,
            "shrunk_error": self.judge(loaded), "dense_nbytes": report.dense_nbytes, "file_nbytes": nbytes,
            "ratio": report.reduction_factor, "density": report.density, "bits": goal.bits,
            "goal_density": goal.density, "newly_wrong": int((wrong & ~dense_wrong).sum()),
            "newly_right": int((dense_wrong & ~wrong).sum()),
        }  # fmt: skip


@torch.no_grad()
def _wrong(task: Task, model: nn.Module) -> Tensor:
    """For each test sample whether the model is wrong about it."""
    model.eval()
    samples, found = task.data.test, []
    for start in range(0, len(samples), 500):
        numbers = torch.arange(start, min(start + 500, len(samples)))
        output = model(task.workload.inputs(samples.x[numbers]))
        found.append(output.argmax(1) != samples.y[numbers])
    return torch.cat(found)


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each network and goal the means over seeds, and how far the error may have risen.

    "no loss": the mean of shrunk − dense error is at most 0, and its one-sided 95 % upper bound (Student's t over
    seeds, each seed paired with its own dense model on the same images) at most 0.1 points; None from one seed.
    """
    groups: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["goal_density"], row["bits"]), []).append(row)
    found = []
    for (network, density, bits), group in groups.items():
        rises = [row["shrunk_error"] - row["dense_error"] for row in group]
        rise, bound = statistics.mean(rises), None
        if len(group) > 1:
            bound = rise + float(stdtrit(len(group) - 1, 0.95)) * statistics.stdev(rises) / math.sqrt(len(group))
        means = {key: statistics.mean(row[key] for row in group)
                 for key in ("dense_error", "shrunk_error", "file_nbytes", "ratio")}  # fmt: skip
        found.append({
            "network": network, "goal_density": density, "bits": bits, "seeds": len(group), **means,
            "least_ratio": min(row["ratio"] for row in group), "rise": rise, "rise_upper_95": bound,
            "no_loss": None if bound is None else rise <= 0 and bound <= 0.001,
        })  # fmt: skip
    return found


def record(**parts: Any) -> dict[str, Any]:
    """What `--json` prints."""
    return {"environment": environment(), **parts}
