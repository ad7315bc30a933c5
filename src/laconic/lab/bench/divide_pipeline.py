"""What a step of a pipeline costs, beside torch's schedules and the least it can cost, all in one run.

Caller: `laconic bench divide`. Two processes, one a host with a core of its own, hold a stage each of the same network,
once for every configuration, and run them in turns; the order rotates, so that a slow minute falls on all.

    step     from a barrier to the end of the step on the slowest host; mean of a block, median of blocks
    bound    `timetable.bound_s`: for each stage micro · (forward + backward), for each link micro · transfer, and what
             the first micro-batch takes to come there and the last to come back; measured computing, the link's rate
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import statistics
from laconic.errors import BadInput
from laconic.exchange.collectives import all_gather, barrier
from laconic.lab.clusters.cluster import Cluster, core_of, interface_nbytes
from laconic.lab.environment import environment
from laconic.lab.records.record import Span
from laconic.parallel.boundary import Boundary
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import Pipeline, build
from laconic.parallel.pipeline.timetable import bound_s
from laconic.transports.launcher import run_local
from laconic.transports.world import World, init

HOSTS = 2
OURS = {
    "async": ("async", "none"),
    "1f1b": ("1f1b", "none"),
    "gpipe": ("gpipe", "none"),
    "dynamic8": ("async", "dynamic8"),
}
PEERS = ("torch 1f1b", "torch gpipe")
CONFIGURATIONS = (*OURS, *PEERS)


@dataclass(frozen=True)
class PipelineSpec:
    """What is measured: 2 stages of `layers` dense layers each; 128 × 1024 float32 are 512 KiB a micro-batch."""

    link: str | None = None
    configurations: Sequence[str] = CONFIGURATIONS
    layers: int = 4
    width: int = 1024
    rows: int = 128
    micro: int = 8
    blocks: int = 5
    steps: int = 2

    def __post_init__(self) -> None:
        unknown = [name for name in self.configurations if name not in CONFIGURATIONS]
        if unknown:
            raise BadInput(f"no pipeline '{unknown[0]}'; the valid ones: {', '.join(CONFIGURATIONS)}")


def measure(spec: PipelineSpec, timeout_s: float = 1800.0) -> dict[str, Any]:
    """Measure all configurations; returns the record that `laconic bench divide --set pipeline --json` prints.

    Raises:
        BadInput: a link or configuration that cannot be.
        RankFailed: a rank failed.
    """
    load = os.getloadavg()[0]
    if spec.link is None:
        ranks = run_local(HOSTS, _run_rank, (spec,), timeout_s)
    else:
        with Cluster(HOSTS, spec.link) as cluster:
            ranks = cluster.run(_run_rank, (spec,), timeout_s=timeout_s)
    rate_bps = None if spec.link is None else cluster.link.rate_bps
    return {
        "results": [_row(spec, name, [rank[name] for rank in ranks], rate_bps) for name in spec.configurations],
        "configuration": asdict(spec), "load_average_before": load, "environment": environment(),
    }  # fmt: skip


def _row(spec: PipelineSpec, name: str, ranks: Sequence[dict[str, Any]], rate_bps: float | None) -> dict[str, Any]:
    blocks = [max(block) for block in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    step = statistics.median(blocks)
    counted = [rank["sent_nbytes"] for rank in ranks if rank["sent_nbytes"] is not None]
    sent = [rank["predicted_nbytes"] / spec.micro * 8 / rate_bps if rate_bps else 0.0 for rank in ranks]
    forward_s, backward_s = ([rank[key] for rank in ranks] for key in ("forward_s", "backward_s"))
    bound = bound_s(forward_s, backward_s, sent[:1], sent[1:], spec.micro)
    return {
        "config": f"pipeline {name}", "engine": "torch" if name in PEERS else "laconic", "hosts": HOSTS,
        "link": spec.link or "loopback", "step_seconds": step.value, "step_seconds_interval": [*step.interval],
        "bound_seconds": bound, "sent_nbytes": max(counted) if counted else None,
        "predicted_nbytes": max(rank["predicted_nbytes"] for rank in ranks),
        "max_error": max(rank["error"] for rank in ranks), "block_seconds": blocks, "micro": spec.micro,
        "timeline": [span for rank in ranks for span in rank["timeline"]],
    }  # fmt: skip


def spans(row: dict[str, Any]) -> list[Span]:
    """A row's timeline, a lane for each stage and way, for `report.lanes`: who computes, and who waits."""
    first = min((begun for _, _, begun, _ in row["timeline"]), default=0.0)
    return [Span(lane, part, begun - first, seconds) for lane, part, begun, seconds in row["timeline"]]


# on every rank


def _run_rank(spec: PipelineSpec) -> dict[str, dict[str, Any]]:
    os.sched_setaffinity(0, {core_of(int(os.environ["RANK"]))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with init() as world:
            return _measure(spec, world)
    finally:
        dist.destroy_process_group()


def _network(spec: PipelineSpec) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(spec.width, spec.width), nn.ReLU()) for _ in range(HOSTS * spec.layers)]
    return nn.Sequential(*layers)


def _measure(spec: PipelineSpec, world: World) -> dict[str, dict[str, Any]]:
    x = torch.randn(spec.micro * spec.rows, spec.width, generator=torch.Generator().manual_seed(1))
    expected = _gradients_alone(spec, x, world.rank)
    forward_s, backward_s = _computing(spec, world)
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name in spec.configurations:
        model, step = (_torch_steps if name in PEERS else _our_steps)(spec, name, x, world)
        step()
        errors = [(p.grad - g).norm() / g.norm() for p, g in zip(model.parameters(), expected, strict=True)]  # type: ignore[operator]
        predicted = model.predicted_nbytes(x) if isinstance(model, Pipeline) else x.nbytes
        sent = model.traffic.total_nbytes if isinstance(model, Pipeline) else None
        found[name] = {"step_s": [], "sent_nbytes": sent, "predicted_nbytes": predicted, "error": float(max(errors)),
                       "forward_s": forward_s, "backward_s": backward_s, "timeline": []}  # fmt: skip
        step()
        runs[name] = step
        if isinstance(model, Pipeline):
            found[name]["timeline"] = [
                (f"stage {world.rank}, {span.way}", span.kind, span.begin_s, span.end_s - span.begin_s)
                for span in model.timeline
            ]
    for block in range(spec.blocks):
        for number in range(len(runs)):
            name = spec.configurations[(block + number) % len(runs)]
            barrier(group=world)
            counted, begun = interface_nbytes() if spec.link else 0, time.perf_counter()
            for _ in range(spec.steps):
                runs[name]()
                barrier(group=world)
            found[name]["step_s"].append((time.perf_counter() - begun) / spec.steps)
            if name in PEERS and spec.link:
                found[name]["sent_nbytes"] = (interface_nbytes() - counted) // spec.steps
    return found


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _own(spec: PipelineSpec, network: nn.Sequential, rank: int) -> nn.Sequential:
    return nn.Sequential(*list(network)[rank * spec.layers : (rank + 1) * spec.layers])


def _our_steps(spec: PipelineSpec, name: str, x: Tensor, world: World) -> tuple[nn.Module, Callable[[], None]]:
    schedule, codec = OURS[name]
    model = build(_network(spec), Stages((str(spec.layers),), spec.micro, schedule), Boundary.of(codec), world)

    def step() -> None:
        model.zero_grad()
        model.step(x, x, _loss)

    return model, step


def _torch_steps(spec: PipelineSpec, name: str, x: Tensor, world: World) -> tuple[nn.Module, Callable[[], None]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    model = _own(spec, _network(spec), world.rank)
    stage = PipelineStage(model, world.rank, HOSTS, torch.device("cpu"), input_args=(x[: spec.rows],))
    schedule = (Schedule1F1B if name == "torch 1f1b" else ScheduleGPipe)(stage, spec.micro, loss_fn=_loss)

    def step() -> None:
        model.zero_grad()
        if world.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=[])

    return model, step


def _gradients_alone(spec: PipelineSpec, x: Tensor, rank: int) -> list[Tensor]:
    """Of this rank's stage, as one process has them."""
    network = _network(spec)
    for part in x.chunk(spec.micro):
        (_loss(network(part), part) / spec.micro).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in _own(spec, network, rank).parameters() if p.grad is not None]


def _computing(spec: PipelineSpec, world: World) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward pass on this rank's stage, while the other computes too."""
    stage = _own(spec, _network(spec), world.rank)
    times: list[tuple[float, float]] = []
    barrier(group=world)
    for _ in range(3 * spec.micro):
        part = torch.randn(spec.rows, spec.width, requires_grad=True)
        begun = time.perf_counter()
        output = stage(part).square().mean()
        turned = time.perf_counter()
        output.backward()
        times.append((turned - begun, time.perf_counter() - turned))
    all_gather(torch.zeros(1), group=world)
    forward, backward = zip(*times[spec.micro :], strict=True)
    return statistics.median(forward).value, statistics.median(backward).value
