"""Peak memory of a rank with DDP alone, `compress` and `distribute`, side by side.

Callers: `laconic bench memory`. Each way trains the same network in processes of its own. The figure is the peak of
resident memory beyond what was resident before the model was built, with imports and kernels loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import codec
from laconic.consistency.distribute import distribute
from laconic.errors import BadInput
from laconic.exchange.collectives import all_gather
from laconic.exchange.hook import compress
from laconic.exchange.job import Job
from laconic.transports.launcher import run_local
from laconic.transports.world import init
from laconic_lab.bench.resident import STATUS, begin_peak, peak_nbytes
from laconic_lab.bench.turns import seconds_of
from laconic_lab.environment import environment

WAYS = ("ddp", "compress", "distribute")


@dataclass(frozen=True)
class Peak:
    """One way of training.

    Attributes:
        gradient_nbytes: of all gradients in float32, which is also the size of a residual.
        peak_nbytes: the most that any rank had resident beyond what it had before the model was built.
        step_s: the median time of a step after the second.
    """

    way: str
    codec: str
    gradient_nbytes: int
    peak_nbytes: int
    step_s: float


def run(specs: Sequence[str], width: int, layers: int, ranks: int = 2, steps: int = 4) -> dict[str, Any]:
    """Measure DDP, then `compress` and `distribute` with each codec: the record that `laconic bench memory` prints."""
    if not STATUS.exists():
        raise BadInput("peak memory is read from /proc, which this system does not have")
    pairs = [("ddp", "none"), *((way, spec) for spec in specs for way in WAYS[1:])]
    peaks = [run_local(ranks, measure, (way, spec, width, layers, steps), timeout_s=600)[0] for way, spec in pairs]
    configuration = {"width": width, "layers": layers, "ranks": ranks, "steps": steps}
    return {"environment": environment(), "configuration": configuration, "results": peaks}


def measure(way: str, spec: str, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train for some steps as one of several ranks; the same figures on all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = init()
    _load_kernels(spec)
    before = begin_peak()
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    numel = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    job: Job | None = None
    if way == "distribute":
        job = distribute(model, optimizer, codec=spec)
    else:
        model = ddp = DistributedDataParallel(model)
        job = compress(ddp, spec) if way == "compress" else None
    x = torch.randn(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    times = [seconds_of(step) for _ in range(steps)]
    found = torch.tensor([peak_nbytes() - before, statistics.median(times[2:] or times)], dtype=torch.float64)
    most = all_gather(found, group=world).amax(0).tolist()
    if job is not None:
        job.close()
    world.close()
    dist.destroy_process_group()
    return asdict(Peak(way, spec, 4 * numel, int(most[0]), most[1]))


def _load_kernels(spec: str) -> None:
    """Use the codec once, so that its kernels' memory is not counted."""
    chosen, x = codec(spec), torch.randn(1 << 12)
    payload = chosen.encode_feedback(x, torch.zeros_like(x))
    chosen.decode_add(payload, x)
    chosen.decode(payload, x.numel(), out=x)
