"""The ranks of a trial: local processes, emulated hosts behind links of a given speed, or this very process.

Callers: `train` and `compare`. Each trial has processes of its own, so that one that breaks takes nothing along.
`run_rank` is what each of them runs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from laconic.consistency import build as build_mode
from laconic.errors import BadInput
from laconic.exchange.costs import GUESS
from laconic.schedules.link import UNLIMITED
from laconic.transports.launcher import LocalJob, start_fork_server
from laconic.transports.profile import Profile
from laconic.transports.relayed_calls import Relay
from laconic.transports.world import World, init
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.clusters.launch import is_launched
from laconic_lab.records.record import Configuration, LinkSetting
from laconic_lab.runs.spec import TrialSpec
from laconic_lab.runs.stopping import request_stop
from laconic_lab.runs.trainer import (
    Ended,
    LockstepTraining,
    RankTraining,
    Report,
    compute_repeatably,
)
from laconic_lab.runs.unsynchronised import FreeTraining

TIMEOUT_S = 1800.0  # how long ranks may wait for one that evaluates; a dead one is noticed at once all the same


def run_rank(trial: TrialSpec, report: Report | None = None) -> Ended:
    """Train on this rank, from the beginning or a checkpoint, to the end or to a request to stop."""
    _listen(trial)
    compute_repeatably()
    own_group = trial.configuration.kind in ("peer", "compress") and not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo")
    try:
        with init(timeout_s=TIMEOUT_S) as world:
            if world.world_size != trial.configuration.workers:
                raise BadInput(f"the run has {trial.configuration.workers} workers, this job {world.world_size}")
            world.profile = _known_link(trial, world)
            return _training(trial)(trial, world, report).run()
    finally:
        if own_group:
            dist.destroy_process_group()


def _training(trial: TrialSpec) -> type[RankTraining]:
    """In a comparison, workers of asynchronous modes run freely; a training is in lockstep, for its checkpoints."""
    chosen = trial.configuration
    if trial.keeps or trial.folder is None or chosen.workers == 1 or not chosen.is_ours:
        return LockstepTraining
    return LockstepTraining if build_mode(chosen.consistency).lockstep else FreeTraining


def _known_link(trial: TrialSpec, world: World) -> Profile | None:
    """The link's known figures, unmeasured: a measurement could lead to another choice, and other bits, next time.

    Codec "auto" measures for itself.
    """
    if trial.link_bps is None or trial.configuration.codec == "auto":
        return None
    return Profile(world.engine, world.world_size, replace(GUESS, s_per_byte=8 / trial.link_bps))


def _listen(trial: TrialSpec) -> None:
    """Set what Ctrl-C, and a SIGTERM to every process of a job, do to this rank.

    In a training SIGTERM is a request to stop, on whichever rank, and under torchrun so is Ctrl-C. All else is left to
    the command that started the ranks, and with which they end.
    """
    def ask(number: int, frame: object) -> None:
        if trial.folder is not None:
            request_stop(Path(trial.folder))

    if not trial.launched:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, ask if trial.keeps else signal.SIG_IGN)
    elif trial.keeps:
        signal.signal(signal.SIGINT, ask)
        signal.signal(signal.SIGTERM, ask)


T = TypeVar("T")
LONGEST_S = 20 * 86400.0  # about the longest wait poll() takes; ranks notice by themselves when one is gone


class Workers:
    """Where trials run; a context manager.

    Args:
        count: workers of a trial, 1 to 256.
        link: emulated links, such as "100mbit,40ms"; None for this machine as it is.
        hosts: how many hosts the workers are divided among; by default each has its own when there is a link.
        between: the link between two sites of half the hosts each; None is one site.

    Raises:
        BadInput: emulation is asked for and not possible here, or the workers cannot be divided evenly.
    """

    def __init__(
        self, count: int, link: str | None = None, hosts: int | None = None, between: str | None = None
    ) -> None:
        if not 1 <= count <= 256:
            raise BadInput(f"between 1 and 256 workers can be started, got {count}")
        self.launched = is_launched()
        emulated = any(each is not None for each in (link, hosts, between))
        if emulated and self.launched:
            own = "--link, --between and --hosts start workers of their own"
            raise BadInput(f"{own}: run this without torchrun or mpiexec")
        if hosts is not None and (hosts < 1 or count % hosts):
            raise BadInput(f"{count} workers cannot be divided evenly among {hosts} hosts")
        self.count = count
        self.hosts = (hosts or count) if emulated else 1
        link = (link or UNLIMITED) if emulated else None
        self.cluster = None if link is None else Cluster(self.hosts, link, between)
        self.setting = LinkSetting(link, emulated, self.hosts, between)

    def __enter__(self) -> Workers:
        if not self.launched:
            start_fork_server("laconic_lab.runs.workers")
        if self.cluster is not None:
            self.cluster.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.cluster is not None:
            self.cluster.close()

    def counted_by(self, workers: int) -> str:
        """How bytes are counted: a host's interface tells one worker's bytes only when it serves one worker."""
        return "interface" if self.cluster is not None and 1 < workers == self.hosts else "exchange"

    def run(self, trial: TrialSpec, report: Report | None = None) -> Ended:
        """Run a trial; returns what rank 0 returns.

        Args:
            report: called with every evaluation but the last, in a thread; True asks the ranks to stop. An error in it
                does so, too, and is raised when they have.

        Raises:
            RankFailed: a rank raised or died; all others are then stopped.
        """
        trial = self.told(trial)
        if report is None or self.launched:
            return self._run(trial, report)
        with Relay(report) as asked:
            return self._run(trial, asked)

    def _run(self, trial: TrialSpec, report: Report | None) -> Ended:
        workers = trial.configuration.workers
        if self.launched:
            return run_rank(trial, report)
        if self.cluster is None or workers == 1:
            job = LocalJob(workers, run_rank, (trial, report))
        else:
            job = self.cluster.start(run_rank, (trial, report), workers // self.hosts)
        try:
            return job.results(LONGEST_S)[0]
        finally:
            job.kill()

    def told(self, trial: TrialSpec) -> TrialSpec:
        """Add the network's facts to a trial: link rate, how bytes are counted, the launcher."""
        counted_by = self.counted_by(trial.configuration.workers)
        slowest_bps = None if self.cluster is None else self.cluster.slowest_bps
        return replace(trial, link_bps=slowest_bps, counted_by=counted_by, launched=self.launched)

    def start_one(self, index: int, function: Callable[..., T], args: tuple[Any, ...]) -> LocalJob[T]:
        """Start `function(*args)` in a process of its own, where the `index`-th worker belongs."""
        if self.cluster is None:
            return LocalJob(1, function, args)
        return self.cluster.start_on(index * self.hosts // self.count, function, args)


def how_counted(counted_by: str, chosen: Configuration) -> str:
    """How a configuration's bytes were found, as the record says it."""
    if counted_by == "interface":
        return "counted by the host's network interface, headers and acknowledgements included"
    return {
        "peer": "not counted: by the formula 2(P-1)/P times the gradient's bytes",
        "single": "nothing is sent",
    }.get(chosen.kind, "counted by the exchange: payloads and their heads")
