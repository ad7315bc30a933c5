"""What a step of a pipeline costs, beside torch's schedules and the least it can cost, all in one run.

Caller: `divide.py`. Two processes, one a host with a core of its own, hold a stage each of the same network, once for
every configuration, and run them in turns; the order rotates, so that a slow minute falls on all.

    step     from a barrier to the end of the step on the slowest host; mean of a block, median of blocks
    bound    `timetable.bound_s`: for each stage micro · (forward + backward), for each link micro · transfer, and what
             the first micro-batch takes to come there and the last to come back; computing as measured in turn with
             the configurations, the link's rate
    pays     the rate above which a codec saves less on the wire than it takes to encode and decode, by that bound
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laconic import statistics
from laconic.errors import BadInput
from laconic.exchange.collectives import barrier
from laconic.parallel.boundary import Boundary, pack, predicted_nbytes, unpack
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import Pipeline, build
from laconic.parallel.pipeline.timetable import bound_s
from laconic.transports.world import World
from laconic_lab.bench.turns import SECONDS, SENT, Turns, Way, conditions, host, on_hosts, slowest, timing
from laconic_lab.records.record import TimeSpan

HOSTS = 2
CODEC = "dynamic8"
OURS = {
    "async": ("async", "none"),
    "1f1b": ("1f1b", "none"),
    "gpipe": ("gpipe", "none"),
    CODEC: ("async", CODEC),
}
PEERS = ("torch 1f1b", "torch gpipe")
CONFIGURATIONS = (*OURS, *PEERS)
ALONE = "alone"  # computing without exchange


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
    """Measure all configurations; returns the record that `python -m benchmarks divide --set pipeline --json` prints.

    Raises:
        BadInput: a link or configuration that cannot be.
        RankFailed: a rank failed.
    """
    before = conditions()
    ranks, rate_bps = on_hosts(HOSTS, spec.link, _run_rank, (spec,), timeout_s)
    stages: list[Computing] = [rank[ALONE] for rank in ranks]
    rows = [_row(spec, name, [rank[name] for rank in ranks], stages, rate_bps) for name in spec.configurations]
    return {
        "results": rows, "configuration": asdict(spec), "computing_seconds": [s.seconds for s in stages],
        "pays_below_bps": pays_below_bps(spec, stages), **before,
    }  # fmt: skip


class Computing(NamedTuple):
    """Seconds that a stage takes for one micro-batch: its passes, and a codec's work on what crosses."""

    forward_s: float
    backward_s: float
    encode_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def pays_below_bps(spec: PipelineSpec, stages: Sequence[Computing]) -> float:
    """The link's rate at which the bound of CODEC equals float32's; above it, sending everything is quicker.

    A stage encodes what it sends and decodes what it receives, one activation and one gradient a micro-batch.
    """
    numel = spec.rows * spec.width
    sizes = [predicted_nbytes(made, numel) for made in (Boundary.of(None).forward, Boundary.of(CODEC).forward)]

    def gain(rate_bps: float) -> float:
        plain, coded = (_bound(spec, stages, 8 * nbytes / rate_bps, coded=nbytes != sizes[0]) for nbytes in sizes)
        return plain - coded

    low, high = 1e5, 1e13
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def _bound(spec: PipelineSpec, stages: Sequence[Computing], wire_s: float, coded: bool = False) -> float:
    first, last = stages
    forward = [first.forward_s + coded * first.encode_s, last.forward_s + coded * last.decode_s]
    backward = [first.backward_s + coded * first.decode_s, last.backward_s + coded * last.encode_s]
    return bound_s(forward, backward, [wire_s], [wire_s], spec.micro)


def _row(
    spec: PipelineSpec, name: str, ranks: Sequence[dict[str, Any]], stages: Sequence[Computing], rate_bps: float | None
) -> dict[str, Any]:
    blocks = slowest(ranks)
    counted = [rank["sent_nbytes"] for rank in ranks if rank["sent_nbytes"] is not None]
    wire_s = ranks[0]["predicted_nbytes"] / spec.micro * 8 / rate_bps if rate_bps else 0.0
    return {
        "config": f"pipeline {name}", "engine": "torch" if name in PEERS else "laconic", "hosts": HOSTS,
        "link": spec.link or "loopback", **timing("step", blocks),
        "bound_seconds": _bound(spec, stages, wire_s), "transfer_seconds": wire_s,
        "sent_nbytes": max(counted) if counted else None,
        "predicted_nbytes": max(rank["predicted_nbytes"] for rank in ranks),
        "max_error": max(rank["error"] for rank in ranks), "block_seconds": blocks, "micro": spec.micro,
        "timeline": [span for rank in ranks for span in rank["timeline"]],
    }  # fmt: skip


def spans(row: dict[str, Any]) -> list[TimeSpan]:
    """A row's timeline, a lane for each stage and way, for `report.lanes`: who computes, and who waits."""
    first = min((begun for _, _, begun, _ in row["timeline"]), default=0.0)
    return [TimeSpan(lane, part, begun - first, seconds) for lane, part, begun, seconds in row["timeline"]]


# on every rank


def _run_rank(spec: PipelineSpec) -> dict[str, Any]:
    with host() as world:
        return _measure(spec, world)


def _network(spec: PipelineSpec) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(spec.width, spec.width), nn.ReLU()) for _ in range(HOSTS * spec.layers)]
    return nn.Sequential(*layers)


def _measure(spec: PipelineSpec, world: World) -> dict[str, Any]:
    x = torch.randn(spec.micro * spec.rows, spec.width, generator=torch.Generator().manual_seed(1))
    expected = _gradients_alone(spec, x, world.rank)
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name in spec.configurations:
        model, step = (_torch_steps if name in PEERS else _our_steps)(spec, name, x, world)
        step()
        errors = [(p.grad - g).norm() / g.norm() for p, g in zip(model.parameters(), expected, strict=True)]  # type: ignore[operator]
        predicted = model.predicted_nbytes(x) if isinstance(model, Pipeline) else x.nbytes
        sent = model.traffic.total_nbytes if isinstance(model, Pipeline) else None
        found[name] = {"sent_nbytes": sent, "predicted_nbytes": predicted, "error": float(max(errors)),
                       "timeline": []}  # fmt: skip
        step()
        runs[name] = step
        if isinstance(model, Pipeline):
            found[name]["timeline"] = [
                (f"stage {world.rank}, {span.way}", span.kind, span.begin_s, span.end_s - span.begin_s)
                for span in model.timeline
            ]
    alone = _Alone(spec, world)
    together = partial(barrier, group=world)
    ways = {name: Way(partial(_in_step, step, together), spec.steps) for name, step in runs.items()}
    blocks = Turns({ALONE: Way(alone.run), **ways}, spec.link, together).run(spec.blocks)
    for name in runs:
        found[name][SECONDS] = blocks[name][SECONDS]
        if name in PEERS and spec.link:
            found[name]["sent_nbytes"] = int(blocks[name][SENT][-1])
    found[ALONE] = alone.medians()
    return found


def _in_step(step: Callable[[], None], together: Callable[[], object]) -> None:
    """A step ends when it has ended on both hosts."""
    step()
    together()


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


class _Alone:
    """What a stage computes for a micro-batch, with nothing sent, while the other stage computes too."""

    def __init__(self, spec: PipelineSpec, world: World) -> None:
        self._spec, self._world, self._stage = spec, world, _own(spec, _network(spec), world.rank)
        self._codec, self._part = Boundary.of(CODEC).forward, torch.randn(spec.rows, spec.width)
        self._times: list[tuple[float, ...]] = []

    def run(self) -> None:
        """A batch of micro-batches; the first ever is warm-up."""
        barrier(group=self._world)
        for number in range(self._spec.micro + (not self._times)):
            part = self._part.clone().requires_grad_()
            clock = [time.perf_counter()]
            output = self._stage(part).square().mean()
            clock.append(time.perf_counter())
            output.backward()
            clock.append(time.perf_counter())
            payload = pack(self._codec, self._part)
            clock.append(time.perf_counter())
            unpack(self._codec, payload, self._part.shape, self._part.dtype)
            clock.append(time.perf_counter())
            if number or self._times:
                self._times.append(tuple(b - a for a, b in pairwise(clock)))
        barrier(group=self._world)

    def medians(self) -> Computing:
        """Over all blocks."""
        return Computing(*(statistics.median(each).value for each in zip(*self._times, strict=True)))
