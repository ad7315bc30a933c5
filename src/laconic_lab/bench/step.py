"""The time of a training step in several configurations, beside its lower bounds, all in one run.

Callers: `laconic bench step`. Every configuration has processes of its own, one a host, as it would have alone; so
memory and threads are its own too. They take turns in short blocks, whose order rotates, so that a slow minute of the
machine falls on all; whose turn it is stands in a store. "alone" is one of them: the same step without any exchange.

    step     from the beginning of a step to that of the next, on the slowest host; mean of a block, median of blocks.
             The first step of a block, which brings the model back into the caches, and the last are not counted.
    bound    max(alone + the codec's kernels, bytes that a host sends / rate of its link)
    DDP's    the same for those whose gradients must have arrived when backward ends, as DDP's: the wire begins when the
             first gradient is there, sends each as soon as it can, and the optimiser comes after the last
    layers'  the same where a weight waits for its own gradient only: it cannot travel between forward and backward
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic import statistics
from laconic.errors import BadInput
from laconic.transports.launcher import LocalJob, start_fork_server
from laconic.transports.rendezvous import new_store
from laconic.transports.world import World
from laconic.workloads import Changes, Task
from laconic.workloads.data import fetch
from laconic_lab.bench.kernel_time import kernel_seconds
from laconic_lab.bench.readiness import Readiness, watch
from laconic_lab.bench.turns import LONGEST, SECONDS, SENT, Turns, TurnStore, Way, conditions, host, slowest, timing
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.records.record import Configuration
from laconic_lab.runs.spec import SINGLE, configuration
from laconic_lab.runs.strategies import PEERS, make_trainee
from laconic_lab.runs.trainee import Times, wire_factor
from laconic_lab.runs.trainer import weights_digest

ALONE = "alone"
EVALUATED = 128  # training samples that the loss is taken on
WARM_UP = 3
AUTO_WARM_UP = 20  # codec "auto" watches DDP, measures and looks back for 17 steps
TIMEOUT_S = 300.0  # of an exchange


@dataclass(frozen=True)
class StepSpec:
    """What is measured.

    Attributes:
        workload: its name, or module:factory.
        configurations: by name; see `runs/spec.py`.
        hosts: one process each.
        link: emulated links; None is this machine's loopback, without limit.
        between: the emulated link between two sites of half the hosts each; None is one site.
        batch: samples a step, of each host; None is the workload's.
        blocks: turns of each configuration.
        steps: counted in a block.
        warm_up: steps of each configuration before the first block; None is a few, or as many as codec "auto" takes to
            choose where it is measured.
        seed: of weights and the order of samples.
        pin: each host has one core, in turn.
    """

    workload: str
    configurations: Sequence[str]
    hosts: int = 2
    link: str | None = None
    between: str | None = None
    batch: int | None = None
    blocks: int = 5
    steps: int = 5
    warm_up: int | None = None
    seed: int = 0
    pin: bool = True

    def __post_init__(self) -> None:
        for name, least in (("hosts", 2), ("blocks", 1), ("steps", 1), ("warm_up", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {value}")

    def settled(self, chosen: Sequence[Configuration]) -> StepSpec:
        """Fill in the number of warm-up steps; equal for all configurations, so that losses are comparable."""
        learns = any(each.codec == "auto" for each in chosen)
        return self if self.warm_up else replace(self, warm_up=AUTO_WARM_UP if learns else WARM_UP)


@dataclass(frozen=True)
class ProcessPlace:
    """A configuration's place in the run, as its ranks need it.

    Attributes:
        chosen: the configuration.
        first: its position among all, which is also its first turn, the warm-up.
        count: configurations in all.
        store: host and port of the store in which turns are passed on.
    """

    chosen: Configuration
    first: int
    count: int
    store: tuple[str, int]


@dataclass
class Measured:
    """One rank's figures of one configuration; lists have an entry a block."""

    step_s: list[float] = field(default_factory=list)
    sent_nbytes: list[float] = field(default_factory=list)
    processor_s: list[dict[str, float]] = field(default_factory=list)
    readiness: list[Readiness] = field(default_factory=list)  # of "alone"
    kernel_s: float = 0.0
    peak_rss_nbytes: int = 0
    loss: float = 0.0
    weights: str = ""


class Steps:
    """A configuration that trains on this rank."""

    def __init__(self, spec: StepSpec, chosen: Configuration, task: Task, world: World) -> None:
        self.task, self.world, self._link = task, world, spec.link
        self.trainee = make_trainee(chosen, task.model, task.optimizer(task.model.parameters()), world)
        self.measured = Measured()
        self._chosen, self._step = chosen, 0
        self._exchanged: list[tuple[str, str, int]] = []  # codec, algorithm and numel, of the last step
        self._in_epoch = task.steps_per_epoch(world.world_size)

    def run(self, steps: int) -> list[float]:
        """Train so many steps; when each of them began."""
        begun = []
        task, trainee, rank, size = self.task, self.trainee, self.world.rank, self.world.world_size
        for _ in range(steps):
            begun.append(time.perf_counter())
            epoch, step = divmod(self._step, self._in_epoch)
            task.begin_step(trainee.optimizer, epoch, step, rank, size)
            trainee.optimizer.zero_grad()
            task.loss(trainee.model, task.batch(epoch, step, rank, size)).backward()
            trainee.optimizer.step()
            self._step += 1
        return begun

    def block(self, steps: int) -> None:
        """A turn: a step that is not counted, `steps` that are, and one more, during which their exchanges may end."""
        ends = self.trainee.module.state_dict  # waits for the exchange that may still be under way
        way = Way(lambda: self.run(1), steps, lead=1, trail=1, settle=ends)
        spent = thread_seconds()
        block = Turns({self._chosen.name: way}, self._link, dist.barrier).block(self._chosen.name)
        spent = {name: seconds - spent.get(name, 0.0) for name, seconds in thread_seconds().items()}
        found, trained = self.measured, steps + 2
        found.step_s.append(block[SECONDS])
        found.processor_s.append({name: seconds / trained for name, seconds in spent.items()})
        self._exchanged = [(each.codec, each.algorithm, each.numel) for each in self.trainee.exchanged()]
        found.sent_nbytes.append(self._counted(trained) if self._link is None else block[SENT])
        if self._chosen.kind == "single":
            trainee = self.trainee
            found.readiness.append(watch(trainee.module, trainee.optimizer, lambda: self.run(1)[0]))
        found.peak_rss_nbytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _time_kernels(self) -> None:
        """Time the codecs of the last block by themselves."""
        if self._chosen.kind == "peer":
            numel = sum(p.numel() for p in self.trainee.module.parameters())
            self._exchanged = [(PEERS[self._chosen.name].codec, "ring", numel)]
        self.measured.kernel_s = kernel_seconds(self._exchanged, self.world.world_size)

    def _counted(self, steps: int) -> float:
        """Bytes a step where no interface counts them: the exchange's own count, or a formula where torch exchanges."""
        if self._chosen.kind == "compress" and not self._exchanged:  # "auto" has left DDP alone
            return wire_factor(self.world.world_size) * sum(4.0 * p.numel() for p in self.trainee.module.parameters())
        if self.trainee.counts:
            return self.trainee.parts(Times(0.0, 0.0, 0.0, 0.0)).sent / steps
        return sum(self.trainee.payload(*named)[1] for named in self.trainee.module.named_parameters())

    def conclude(self) -> Measured:
        """Measure what comes after the last block, in a turn of its own, so as not to disturb others' steps."""
        self._time_kernels()
        self.trainee.finish()
        found = self.measured
        found.weights = weights_digest(self.trainee.module).hex()
        found.loss = self.loss()
        self.trainee.close()
        return found

    def loss(self, samples: int = EVALUATED) -> float:
        """The loss on so many training samples, the same for all configurations."""
        module, train = self.trainee.module, self.task.data.train
        numbers = torch.arange(0, len(train), max(1, len(train) // samples))[:samples]
        module.eval()
        with torch.no_grad():
            found = float(self.task.loss(module, self.task.batch_of(0, numbers)))
        module.train()
        return found


def run_rank(spec: StepSpec, place: ProcessPlace) -> Measured:
    """Train one configuration on this rank, in its turns."""
    turns = TurnStore(*place.store)
    with host(spec.pin, TIMEOUT_S, threads=None) as world:
        task = Changes(batch=spec.batch).of(spec.workload).prepare(spec.seed, scaling="weak")
        steps = Steps(spec, place.chosen, task, world)
        warm_up, *blocks, last = TurnStore.numbers(place.first, place.count, spec.blocks + 1)
        with turns.taken(warm_up):
            steps.run(spec.warm_up or WARM_UP)
            steps.block(1)
        steps.measured = Measured()
        for turn in blocks:
            with turns.taken(turn):
                steps.block(spec.steps)
        with turns.taken(last):
            return steps.conclude()


def thread_seconds() -> dict[str, float]:
    """Processor seconds of this process so far, by the name of the thread."""
    found: defaultdict[str, float] = defaultdict(float)
    for folder in Path("/proc/self/task").iterdir():
        name = (folder / "comm").read_text().strip()
        found["main" if folder.name == str(os.getpid()) else name] += int((folder / "schedstat").read_text().split()[0])
    return {name: nanoseconds / 1e9 for name, nanoseconds in found.items()}


def measure(spec: StepSpec) -> dict[str, Any]:
    """Measure all configurations; returns the record that `laconic bench step --json` prints.

    Raises:
        BadInput: a configuration, workload or link that cannot be.
        RankFailed: a rank failed; all are then stopped.
    """
    workload = Changes(batch=spec.batch).of(spec.workload)
    chosen = [configuration(SINGLE, 1), *(configuration(name, spec.hosts) for name in spec.configurations)]
    spec = spec.settled(chosen)
    before = conditions(spec.hosts)
    with ExitStack() as stack:
        cluster = None if spec.link is None else stack.enter_context(Cluster(spec.hosts, spec.link, spec.between))
        fetch(workload.dataset)
        start_fork_server("laconic_lab.bench.step")
        turns = cluster.new_store() if cluster else new_store()
        jobs: list[LocalJob[Measured]] = []
        for first, each in enumerate(chosen):
            task = (spec, ProcessPlace(each, first, len(chosen), (turns.host, turns.port)))
            jobs.append(cluster.start(run_rank, task) if cluster else LocalJob(spec.hosts, run_rank, task))
            stack.callback(jobs[-1].kill)
        alone, *rest = _results(jobs)
    rate_bps = None if cluster is None else cluster.link.rate_bps
    compute_s = statistics.median(slowest([{SECONDS: rank.step_s} for rank in alone])).value
    floor = Floor(compute_s, rate_bps, [each for rank in alone for each in rank.readiness])
    return {
        "results": [_row(each.name, each.kind, ranks, floor) for each, ranks in zip(chosen[1:], rest, strict=True)],
        "alone": _row(ALONE, SINGLE, alone, floor),
        "configuration": {**asdict(spec), "link": spec.link or "loopback", "batch": workload.batch},
        **before,
    }


def _results(jobs: Sequence[LocalJob[Measured]]) -> list[list[Measured]]:
    """Every job's results by rank; the first failure ends all jobs, which would otherwise wait for their turn."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        waiting = [pool.submit(job.results, LONGEST.total_seconds()) for job in jobs]
        try:
            ended, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            failed = next((each for each in ended if each.exception() is not None), None)
        finally:
            for job in jobs:
                for process in job.processes:
                    process.kill()
        return [each.result() for each in ([failed] if failed else waiting)]


@dataclass(frozen=True)
class Floor:
    """The inputs of a step's lower bounds: computing alone, the link, and when gradients are ready."""

    compute_s: float
    rate_bps: float | None
    readiness: Sequence[Readiness]

    def ddp_seconds(self, wire_s: float) -> float:
        """The least time where the optimiser waits for all that was sent; the median over the blocks."""
        return statistics.median([each.ddp_bound_seconds(self.compute_s, wire_s) for each in self.readiness]).value

    def layer_seconds(self, wire_s: float) -> float:
        """The least time where every weight waits for its own gradient; the median over the blocks."""
        return statistics.median([each.layer_bound_seconds(self.compute_s, wire_s) for each in self.readiness]).value


def _row(name: str, kind: str, ranks: Sequence[Measured], floor: Floor) -> dict[str, Any]:
    blocks = slowest([{SECONDS: rank.step_s} for rank in ranks])
    step = timing("step", blocks)
    kernels_s = max(rank.kernel_s for rank in ranks)
    sent = max(statistics.median(rank.sent_nbytes).value for rank in ranks)
    wire_s = 0.0 if floor.rate_bps is None else 8 * sent / floor.rate_bps
    least_s = floor.compute_s + kernels_s
    bound_s, threads = max(least_s, wire_s), _by_thread(ranks)
    ddp_s = max(least_s, floor.ddp_seconds(wire_s)) if kind in ("peer", "compress") else None
    layer_s = max(bound_s, floor.layer_seconds(wire_s))
    return {
        "config": name,
        **step,
        "compute_seconds": floor.compute_s,
        "kernel_seconds": kernels_s,
        "wire_seconds": wire_s,
        "bound_seconds": bound_s,
        "ratio_to_bound": step["step_seconds"] / bound_s,
        "ddp_bound_seconds": ddp_s,
        "ratio_to_ddp_bound": None if ddp_s is None else step["step_seconds"] / ddp_s,
        "layer_bound_seconds": layer_s,
        "ratio_to_layer_bound": step["step_seconds"] / layer_s,
        "processor_seconds": sum(threads.values()),
        "processor_seconds_by_thread": threads,
        "sent_nbytes": sent,
        "loss": ranks[0].loss,
        "peak_rss_nbytes": max(rank.peak_rss_nbytes for rank in ranks),
        "replicas_identical": None if kind == SINGLE else len({rank.weights for rank in ranks}) == 1,
        "block_seconds": blocks,
    }


def _by_thread(ranks: Sequence[Measured]) -> dict[str, float]:
    """Processor seconds per step by thread, the mean of ranks and blocks; those under 0.1 ms summed as "other"."""
    blocks = [block for rank in ranks for block in rank.processor_s]
    found: defaultdict[str, float] = defaultdict(float)
    for name in {name for block in blocks for name in block}:
        seconds = sum(block.get(name, 0.0) for block in blocks) / len(blocks)
        found[name if seconds >= 1e-4 else "other"] += seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))
