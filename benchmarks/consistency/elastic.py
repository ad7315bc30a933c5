"""What a step of `laconic.elastic` costs beside one of `laconic.distribute` without overlap, in one run.

    python -m benchmarks elastic --hosts 8 --link 1gbit --output benchmarks/results/elastic-8-hosts.json

Needs root (each host is a network namespace behind `tc tbf`). One process a host trains the same workload both ways, on
as many samples a step, with one thread; the two take turns in short blocks, whose order alternates, so that a slow
minute of the machine falls on both. A step's time is the slowest host's; the first of a block is not counted.

    payload   the bytes that one gradient takes through the codec, float32 where no codec touches it
    least     2·(P − 1)/P payloads, which a host sends in any all-reduce
    sent      what the busiest host's interface sent a step, headers and acknowledgements included
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from laconic.statistics import median
from laconic.storage.files import replace
from laconic.transports.world import World, init
from laconic.workloads import Changes
from laconic_lab.clusters.cluster import Cluster, core_of, interface_nbytes
from laconic_lab.environment import environment

WAYS = ("distribute", "elastic")
WARM_UP = 4


@dataclass(frozen=True)
class Spec:
    """What is measured; `batch` is of each host."""

    workload: str
    codec: str
    hosts: int
    link: str
    batch: int
    blocks: int
    steps: int
    meeting: str


@dataclass
class Measured:
    """One host's figures of one way, an entry a block, and whether its model is everybody's."""

    step_s: list[float] = field(default_factory=list)
    sent_nbytes: list[float] = field(default_factory=list)
    counted_nbytes: list[float] = field(default_factory=list)
    payload_nbytes: int = 0
    weights: float = 0.0


def _distributed(spec: Spec, world: World) -> Iterator[int]:
    """Steps by `distribute`; yields the bytes sent so far, as counted by the exchange."""
    task = Changes(batch=spec.batch).of(spec.workload).prepare(0, scaling="weak")
    model, optimizer = task.model, task.optimizer(task.model.parameters())
    job = laconic.distribute(model, optimizer, codec=spec.codec, world=world, overlap=False)
    sent, in_epoch = 0, task.steps_per_epoch(world.world_size)
    for number in range(1 << 30):
        epoch, step = divmod(number, in_epoch)
        job.optimizer.zero_grad()
        task.loss(job.model, task.batch(epoch, step, world.rank, world.world_size)).backward()
        job.optimizer.step()
        sent += job.records[-1].sent_nbytes
        yield sent


def _elastic(spec: Spec, found: Measured) -> Iterator[int]:
    """Steps by `elastic`; yields the bytes sent so far, as counted by the line, headers of messages included."""
    task = Changes(batch=spec.batch).of(spec.workload).prepare(0, scaling="weak")
    model, optimizer = task.model, task.optimizer(task.model.parameters())
    data = laconic.Samples(len(task.data.train), spec.batch * spec.hosts, epochs=1 << 20)
    options = {"workers": spec.hosts, "patience_s": 120.0}
    with laconic.elastic(model, optimizer, data, spec.meeting, codec=spec.codec, **options) as job:
        replica, codec = job._replica, laconic.codec(spec.codec)
        coded = codec.max_nbytes(replica.coded_numel) if replica.coded_numel else 0
        found.payload_nbytes = coded + 4 * (replica.numel - replica.coded_numel)
        sent = 0
        for numbers in job.batches():
            task.loss(model, task.batch_of(job.epoch, numbers)).backward()
            if not job.step():
                raise RuntimeError("the members have changed")
            found.weights = float(job.digest)
            sent += job.records[-1].sent_nbytes
            yield sent


def run_rank(spec: Spec) -> dict[str, Measured]:
    """Both ways on this host."""
    os.sched_setaffinity(0, {core_of(int(os.environ["RANK"]))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with init() as world:
            found = {way: Measured() for way in WAYS}
            steps = {"distribute": _distributed(spec, world), "elastic": _elastic(spec, found["elastic"])}
            for block in range(-1, spec.blocks):
                for way in WAYS if block % 2 else reversed(WAYS):
                    _block(steps[way], WARM_UP if block < 0 else spec.steps, found[way] if block >= 0 else Measured())
            dist.barrier()
            for each in steps.values():
                each.close()  # type: ignore[attr-defined]
            return found
    finally:
        dist.destroy_process_group()


def _block(steps: Iterator[int], count: int, found: Measured) -> None:
    """A turn of one way: a step that is not counted, and `count` that are."""
    dist.barrier()
    next(steps)
    dist.barrier()
    sent, begun, counted = interface_nbytes(), time.perf_counter(), next(steps)
    for _ in range(count - 1):
        total = next(steps)
    seconds = time.perf_counter() - begun
    dist.barrier()
    found.step_s.append(seconds / count)
    found.sent_nbytes.append((interface_nbytes() - sent) / count)
    found.counted_nbytes.append((total - counted) / (count - 1))


def measure(spec: Spec) -> dict[str, object]:
    """The record that is written."""
    load = os.getloadavg()[0]
    with Cluster(spec.hosts, spec.link) as cluster:
        ranks = cluster.run(run_rank, (spec,), timeout_s=3600.0)
    rows = {way: _row([rank[way] for rank in ranks]) for way in WAYS}
    payload = ranks[0]["elastic"].payload_nbytes
    least = 2 * (spec.hosts - 1) / spec.hosts * payload
    return {
        "results": rows,
        "payload_nbytes": payload,
        "least_nbytes": least,
        "busiest_to_least": rows["elastic"]["counted_nbytes"] / least,
        "interface_to_least": rows["elastic"]["sent_nbytes"] / least,
        "elastic_to_distribute": rows["elastic"]["step_seconds"] / rows["distribute"]["step_seconds"],
        "replicas_identical": len({rank["elastic"].weights for rank in ranks}) == 1,
        "configuration": {name: value for name, value in asdict(spec).items() if name != "meeting"},
        "oversubscribed": spec.hosts > len(os.sched_getaffinity(0)),
        "load_average_before": load,
        "environment": environment(),
    }


def _row(ranks: list[Measured]) -> dict[str, float]:
    slowest = [max(block) for block in zip(*(rank.step_s for rank in ranks), strict=True)]
    busiest: Callable[[str], float] = lambda name: max(median(getattr(rank, name)).value for rank in ranks)  # noqa: E731
    step = median(slowest)
    return {
        "step_seconds": step.value,
        "step_seconds_interval": [*step.interval],
        "sent_nbytes": busiest("sent_nbytes"),
        "counted_nbytes": busiest("counted_nbytes"),
        "block_seconds": slowest,
    }


def main() -> int:
    """Measure, print and write; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="mnist-mlp")
    parser.add_argument("--codec", default="dynamic8")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--batch", type=int, default=64, help="samples of each host")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--output", type=Path)
    given = vars(parser.parse_args())
    output = given.pop("output")
    with tempfile.TemporaryDirectory() as meeting:
        record = measure(Spec(**given, meeting=meeting))
    if output is not None:
        replace(output, json.dumps(record, indent=1) + "\n")
    for name in ("busiest_to_least", "interface_to_least", "elastic_to_distribute", "replicas_identical"):
        print(f"{name:24}{record[name]}")
    for way, row in record["results"].items():
        step_ms, sent_mb = 1000 * row["step_seconds"], row["sent_nbytes"] / 1e6
        print(f"{way:24}{step_ms:.1f} ms a step, {sent_mb:.2f} MB from the busiest host")
    return int(record["busiest_to_least"] > 1.2 or record["elastic_to_distribute"] > 1.3)
