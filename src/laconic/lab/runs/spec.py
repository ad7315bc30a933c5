"""What is asked for: of a whole run by the user, and of one trial by the run.

Callers: the command line makes a RunSpec; `train` and `compare` make a TrialSpec of it for each training, which every
worker is given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import BadInput
from laconic.lab.records.record import Configuration
from laconic.workloads import AS_DECLARED, Changes, Workload


@dataclass(frozen=True)
class RunSpec:
    """A training, or a comparison of several.

    Attributes:
        workload: its name, or module:factory.
        workers: how many train together.
        configurations: ways of training by name, see `configurations.py`.
        seeds: one trial of each configuration for each.
        algorithm: of the compressed all-reduce.
        link: speed of emulated links; None for the machine as it is.
        hosts: emulated hosts; None for one a worker where links are emulated.
        changes: what is asked of the workload in place of its own.
        slow: the last worker computes this many times as long.
        tuning_runs: how many runs it took to choose the settings.
        runs: the folder of all runs.
        command: as the user typed it.
    """

    workload: str
    workers: int = 4
    configurations: Sequence[str] = ("none",)
    seeds: Sequence[int] = (0,)
    algorithm: str = "auto"
    link: str | None = None
    hosts: int | None = None
    changes: Changes = AS_DECLARED
    slow: float = 1.0
    tuning_runs: int | None = None
    runs: Path = Path("runs")
    command: str = ""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise BadInput("--seeds must be at least 1, got 0")
        if wrong := [seed for seed in self.seeds if not 0 <= seed < 2**63]:
            raise BadInput(f"--seed must be from 0 to below 2⁶³, got {wrong[0]}")
        if not 1 <= self.slow < 1000:
            raise BadInput(f"--slow must be from 1 to below 1000, got {self.slow}")


@dataclass(frozen=True)
class TrialSpec:
    """One training, as every worker of it is told.

    Attributes:
        workload: its name, or module:factory.
        changes: what is asked in place of its own.
        order: the trial's position in the run.
        folder: the run's, for metrics, requests and checkpoints; None for no file at all.
        keeps: whether checkpoints are written.
        resume: the step of the checkpoint to go on from; 0 without one.
        start: which start of the run this is; the first is 1.
        index: which of the workers it is, where each is started by itself.
        link_bps: the emulated links' rate, for choosing between exchanges of one round and of two; None if unlimited.
        counted_by: "interface" where each worker has a network interface of its own, "exchange" otherwise.
        launched: started by torchrun or mpiexec, whose signals reach the ranks themselves.
        slow: the last rank computes this many times as long, by sleeping; 1 does not.
    """

    workload: str
    configuration: Configuration
    seed: int
    changes: Changes = AS_DECLARED
    order: int = 0
    folder: str | None = None
    keeps: bool = False
    resume: int = 0
    start: int = 1
    index: int = 0
    link_bps: float | None = None
    counted_by: str = "exchange"
    launched: bool = False
    slow: float = 1.0


class Prepared:
    """A trial's task, read and timed.

    Attributes:
        loading_s: how long the data took to read.
        samples_per_step: over all workers, in the mean.
    """

    def __init__(self, trial: TrialSpec, workload: Workload) -> None:
        begun = time.perf_counter()
        self.workload, self.task = workload, workload.prepare(trial.seed)
        self.loading_s = time.perf_counter() - begun
        self.steps_per_epoch = self.task.steps_per_epoch(trial.configuration.workers)
        self.total_steps = workload.epochs * self.steps_per_epoch
        self.samples_per_step = len(self.task.data.train) / self.steps_per_epoch


def load_software(workload: Workload) -> None:
    """Import what reads the data: the clock measures the reading, not the loading of a library."""
    if workload.dataset.startswith("rcv1"):
        import sklearn.datasets  # noqa: F401


