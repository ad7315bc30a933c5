"""The job behind `make demo`: real gradients, summed by every algorithm, checked, timed and counted.

Each rank computes the gradient of a small network on its share of scikit-learn's handwritten digits; every all-reduce
algorithm then sums these gradients, beside what the profile predicted and the formula says is sent.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from laconic import schedules
from laconic.exchange import auto
from laconic.exchange.collectives import all_gather, all_reduce
from laconic.transports.probe import probe
from laconic.transports.world import World, init

HIDDEN = 256
REPEATS = 15


def gradient(rank: int, world_size: int) -> Tensor:
    """The flat gradient of a 64-256-256-10 network on this rank's share of the digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[rank::world_size], dtype=torch.float32) / 16
    y = torch.tensor(labels[rank::world_size])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def measure() -> dict[str, Any]:
    """Join the job and sum the ranks' gradients by every algorithm; the record `laconic demo` prints."""
    with init() as world:
        own = gradient(world.rank, world.world_size)
        world.profile = probe(world.transport, quick=True)
        expected = all_gather(own, group=world).double().sum(0)
        rows = [_row(world, name, own, expected) for name in auto.candidates(world)]
        return {
            "engine": world.engine,
            "world_size": world.world_size,
            "numel": own.numel(),
            "pick": auto.pick(world, own.nbytes),
            "rows": rows,
        }


def _row(world: World, name: str, own: Tensor, expected: Tensor) -> dict[str, Any]:
    assert world.profile is not None
    times, counters = [], world.transport.counters
    sent_before = counters.total_sent_nbytes
    for _ in range(REPEATS):
        result = own.clone()
        begun = time.perf_counter()
        all_reduce(result, algorithm=name, group=world)
        times.append(time.perf_counter() - begun)
    sent = (counters.total_sent_nbytes - sent_before) // REPEATS
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64)
    all_reduce(slowest, "max", algorithm="tree", group=world)
    total = all_reduce(torch.tensor([sent]), algorithm="tree", group=world)
    # Each of P−1 additions rounds to float32 once.
    bound = world.world_size * torch.finfo(torch.float32).eps * all_reduce(own.abs(), algorithm="tree", group=world)
    wrong = int((result.double() - expected).abs().gt(bound).sum())
    right = all_reduce(torch.tensor([wrong]), algorithm="tree", group=world).item() == 0
    formula = None
    if name != auto.NATIVE:
        formula = 4 * schedules.get("all_reduce", name).sent_numel(world.world_size, own.numel())
    return {
        "algorithm": name,
        "right": right,
        "seconds": slowest.item(),
        "predicted_seconds": world.profile.seconds(name, world.world_size, own.nbytes),
        "sent_nbytes": total.item() if formula is not None else None,
        "formula_nbytes": formula,
    }
