"""A small least-squares problem, the same in torch and in NumPy: what the references of the modes are checked on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import laconic

SIZE, ROWS, ETA = 40, 8, 0.05
Vector = NDArray[np.float64]


def batch(rank: int, step: int) -> tuple[Vector, Vector]:
    """Worker `rank`'s samples at its step `step`."""
    draw = np.random.default_rng([rank, step])
    x = draw.standard_normal((ROWS, SIZE)).astype(np.float32)
    return x.astype(np.float64), (x.sum(axis=1) + rank).astype(np.float64)


def gradient(rank: int, step: int, w: Vector) -> Vector:
    """Of ‖Xw − y‖² / (2·ROWS)."""
    x, y = batch(rank, step)
    return np.asarray(x.T @ (x @ w - y) / ROWS)


def start() -> Vector:
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32).astype(np.float64)


class Model(nn.Module):
    """w, in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        first, second = torch.from_numpy(start()).float().split([SIZE - 10, 10])
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone().view(2, 5))

    @property
    def w(self) -> Tensor:
        return torch.cat([self.first, self.second.reshape(-1)])


def train(spec: str, steps: int, world: Any = None, **options: Any) -> dict[str, Any]:
    """Train by one mode; returns this worker's weights before and after `finish`, and its records."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), ETA)
    agreement = laconic.distribute(model, optimizer, consistency=spec, world=world, **({"codec": "none"} | options))
    for step in range(steps):
        x, y = (torch.from_numpy(part).float() for part in batch(agreement.world.rank, step))
        optimizer.zero_grad()
        ((x @ model.w - y).square().sum() / (2 * ROWS)).backward()
        optimizer.step()
    own = model.w.detach().clone()
    agreement.finish()
    found = {"own": own, "end": model.w.detach().clone(), "records": list(agreement.records)}
    agreement.close()
    return found


def train_all(specs: list[str], steps: int) -> dict[str, Any]:
    """What one of several processes does: train by each mode. It is here so that a process need not import pytest."""
    with laconic.init(timeout_s=60):
        return {spec: train(spec, steps) for spec in specs}


def train_rows(
    specs: list[str], steps: int, sites: list[int] | None = None, codec: str = "none"
) -> dict[str, list[list[list[float]]]]:
    """As `train_all` on any engine: by mode, all ranks' weights before and after `finish`, in plain numbers."""
    with laconic.init(timeout_s=60) as world:
        found = {}
        for spec in specs:
            ended = train(spec, steps, sites=sites, codec=codec)
            rows = [laconic.all_gather(ended[name], group=world).view(-1, SIZE) for name in ("own", "end")]
            found[spec] = [each.tolist() for each in rows]
        return found
