"""What a step of a divided model costs beside torch's own divisions and the least that it can cost.

Caller: `divide.py`. Two or more hosts, one process each, hold every configuration at once and take turns in blocks, so
that all are measured in one run. Random inputs; a step is forward and backward, without an optimiser.

    dense   a batch through two dense layers, width → inner → width, cut by output and by input: torch's tensor parallel
            beside ours
    trick   AlexNet: data-parallel convolutions and divided dense layers beside DistributedDataParallel

The bound is the larger of computing and wire, as if one hid the other. Computing is that of the same parts without any
exchange. Dense layers cannot reach it where both are long, since a layer waits for the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic import statistics
from laconic.errors import BadInput, UnknownName
from laconic.parallel.divide import CONTEXT, divide
from laconic.parallel.moves import even
from laconic.parallel.predict import predict
from laconic.transports.world import World
from laconic.workloads.models.registry import build
from laconic_lab.bench.turns import SENT, Turns, Way, conditions, host, on_hosts, slowest

DENSE_PLAN = "0=dense(output); 2=dense(input)"
SETS = {
    "dense": ("torch-tensor-parallel", "divide:none", "divide:dynamic8"),
    "trick": ("ddp", "trick(all):dynamic8", "trick(turns):dynamic8", "trick(shares):dynamic8"),
}
ALONE = "alone"  # computing without exchange
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class DivideSpec:
    """What is measured: rows (of the trick: images a host), sizes of dense layers, blocks of steps; () means all."""

    set: str = "dense"
    hosts: int = 2
    link: str | None = None
    batch: int = 128
    width: int = 512
    inner: int = 2048
    blocks: int = 5
    steps: int = 3
    pin: bool = True
    configurations: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.set not in SETS:
            raise UnknownName("set of divisions", self.set, SETS)
        if min(self.hosts - 1, self.batch, self.width, self.inner, self.blocks, self.steps) < 1:
            raise BadInput("a division needs 2 hosts or more, and batch, width, inner, blocks and steps of 1 or more")
        if unknown := [name for name in self.configurations if name not in SETS[self.set]]:
            raise UnknownName(f"configuration of {self.set}", unknown[0], SETS[self.set])

    @property
    def names(self) -> Sequence[str]:
        """The configurations that are measured."""
        return self.configurations or SETS[self.set]


@dataclass
class Subject:
    """One configuration: a step, what it foresees to send, and totals of what it has sent and waited."""

    step: Callable[[], Any]
    output: Callable[[], Tensor]
    predicted_nbytes: int
    counters: Mapping[str, Callable[[], float]] = field(default_factory=dict)  # none where only the wire knows


def _step(model: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        model(x).square().mean().backward()  # type: ignore[no-untyped-call]

    return run


def _ours(model: nn.Module, plan: str, codec: str, x: Tensor, world: World) -> Subject:
    foreseen = predict(model, plan, x, world.world_size, codec=codec, rank=world.rank)
    divided = divide(model, plan, codec=codec, world=world)
    traffic = getattr(divided, CONTEXT).traffic
    counters = {SENT: lambda: traffic.total_nbytes, "waited": lambda: sum(traffic.wait_s.values())}
    return Subject(_step(divided, x), lambda: divided(x), foreseen.nbytes, counters)


def _mlp(width: int, inner: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))


def _dense(name: str, spec: DivideSpec, world: World) -> Subject:
    x = torch.randn(spec.batch, spec.width, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if name == ALONE:
        part = _mlp(spec.width, even(spec.inner, spec.hosts)[world.rank])
        return Subject(_step(part, x), lambda: part(x), 0)
    if name == "torch-tensor-parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(_mlp(spec.width, spec.inner), init_device_mesh("cpu", (spec.hosts,)), styles)
        ring = 2 * (spec.hosts - 1) / spec.hosts  # of an all-reduce
        return Subject(_step(model, x), lambda: model(x), int(2 * ring * 4 * spec.batch * spec.width))
    return _ours(_mlp(spec.width, spec.inner), DENSE_PLAN, name.partition(":")[2], x, world)


class AlexNet(nn.Module):
    """AlexNet in two parts: convolutions, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(build("alexnet").children())
        first = next(place for place, layer in enumerate(layers) if isinstance(layer, nn.Flatten)) + 1
        self.features, self.classifier = nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:])
        self.eval()  # dropout draws other numbers in another division

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits

    def dense(self) -> list[str]:
        """The names of the dense layers."""
        return [f"classifier.{name}" for name, each in self.classifier.named_children() if isinstance(each, nn.Linear)]


def dense_plan(model: AlexNet) -> str:
    """How its dense layers are divided: by output, by input, by output."""
    cuts = zip(model.dense(), ("output", "input", "output"), strict=True)
    return "; ".join(f"{layer}=dense({way})" for layer, way in cuts)


class Computing(nn.Module):
    """What a rank computes of the trick, with nothing sent: its own rows, then its part of the dense layers for all."""

    def __init__(self, net: AlexNet, ranks: int, rank: int) -> None:
        super().__init__()
        self.features, self.ranks = net.features, ranks
        cuts = [tuple(net.get_parameter(f"{name}.weight").shape) for name in net.dense()]  # output, input, output
        parts = [even(cuts[0][0], ranks)[rank], even(cuts[1][1], ranks)[rank], even(cuts[2][0], ranks)[rank]]
        self.classifier = nn.Sequential(
            nn.Linear(cuts[0][1], parts[0]), nn.ReLU(), nn.Linear(parts[1], cuts[1][0]), nn.ReLU(),
            nn.Linear(cuts[2][1], parts[2]),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).repeat(self.ranks, 1))
        return logits


def _trick(name: str, spec: DivideSpec, world: World) -> Subject:
    torch.manual_seed(0)
    model = AlexNet()
    x = torch.randn(spec.batch, 3, 224, 224, generator=torch.Generator().manual_seed(world.rank))
    if name == ALONE:
        part = Computing(model, spec.hosts, world.rank)
        return Subject(_step(part, x), lambda: part(x), 0)
    if name == "ddp":
        wrapped = DistributedDataParallel(model)
        ring = 2 * (spec.hosts - 1) / spec.hosts
        nbytes = int(4 * ring * sum(p.numel() for p in model.parameters()))
        return Subject(_step(wrapped, x), lambda: wrapped(x), nbytes)
    scheme, codec = name.removeprefix("trick(").split("):")
    plan = f"features=data(codec={codec}); classifier=trick({scheme}); {dense_plan(model)}"
    return _ours(model, plan, codec, x, world)


MAKERS = {"dense": _dense, "trick": _trick}


def run_rank(spec: DivideSpec) -> dict[str, dict[str, Any]]:
    """All configurations of a set on this rank, in turns; figures by configuration."""
    with host(spec.pin, TIMEOUT_S) as world:
        subjects = {name: MAKERS[spec.set](name, spec, world) for name in (ALONE, *spec.names)}
        return _measured(spec, subjects)


def _measured(spec: DivideSpec, subjects: dict[str, Subject]) -> dict[str, dict[str, Any]]:
    with torch.no_grad():
        outputs = {name: subject.output() for name, subject in subjects.items()}
    exact = outputs[SETS[spec.set][0] if SETS[spec.set][0] in outputs else spec.names[0]]  # the peer's
    ways = {name: Way(subject.step, spec.steps, counters=subject.counters) for name, subject in subjects.items()}
    found: dict[str, dict[str, Any]] = dict(Turns(ways, spec.link, dist.barrier).run(spec.blocks))
    for name, subject in subjects.items():
        same = outputs[name].shape == exact.shape and name != ALONE
        error = float((outputs[name] - exact).abs().max() / exact.abs().max()) if same else 0.0
        found[name] |= {"predicted": subject.predicted_nbytes, "error": error}
    return found


def measure(spec: DivideSpec) -> dict[str, Any]:
    """Measure all configurations of a set; returns the record that `python -m benchmarks divide --json` prints.

    Raises:
        BadInput: hosts or a link that cannot be.
        RankFailed: a rank failed; all are then stopped.
    """
    before = conditions(spec.hosts)
    ranks, rate_bps = on_hosts(spec.hosts, spec.link, run_rank, (spec,))
    alone = _median([rank[ALONE] for rank in ranks])
    rows = [_row(name, [rank[name] for rank in ranks], spec, alone, rate_bps) for name in spec.names]
    return {"results": rows, "configuration": asdict(spec), "alone_seconds": alone, **before}


def _median(ranks: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(slowest(ranks)).value)


def _row(
    name: str, ranks: Sequence[dict[str, Any]], spec: DivideSpec, alone: float, rate_bps: float | None
) -> dict[str, Any]:
    predicted = max(rank["predicted"] for rank in ranks)
    sent = [block for rank in ranks for block in rank.get(SENT, ())]
    wire = 0.0 if rate_bps is None else 8 * predicted / rate_bps
    return {
        "config": name,
        "engine": "gloo",
        "hosts": spec.hosts,
        "link": spec.link or "loopback",
        "step_seconds": _median(ranks),
        "block_seconds": slowest(ranks),
        "wait_seconds": _waited(ranks),
        "bound_seconds": max(alone, wire),
        "sent_nbytes": max(sent) if sent else None,
        "predicted_nbytes": predicted,
        "max_error": max(rank["error"] for rank in ranks),
    }


def _waited(ranks: Sequence[dict[str, Any]]) -> float | None:
    """Seconds a step that ranks waited for messages, the median; None where nobody counts them."""
    blocks = [block for rank in ranks for block in rank.get("waited", ())]
    return (float(statistics.median(blocks).value) or None) if blocks else None
