"""How quickly layers of few weights run, beside dense ones and torch's own sparse product.

Caller: `python -m benchmarks shrink`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from laconic.operators.timing import race
from laconic.shrinking import prune
from laconic.shrinking.sparse_layers import SparseChain, SparseLinear, compressed


def running(density: float = 0.05, turns: int = 21) -> Iterator[dict[str, Any]]:
    """A fully connected layer with few weights beside torch's dense one and its sparse `F.linear`."""
    for size in (1024, 4096):
        layer = nn.Linear(size, size)
        mask = prune.magnitude({"w": layer.weight}, density, scope="layer")["w"]
        layer.weight.data.mul_(mask)
        weight = layer.weight.detach()
        rows = compressed(lambda start, stop, weight=weight: weight[start:stop], (size, size))  # type: ignore[misc]
        chain, csr = SparseChain([SparseLinear(rows, layer.bias)]), weight.to_sparse_csr()
        for batch in (1, 64):
            x = torch.randn(batch, size)
            ways: dict[str, Callable[[], object]] = {
                "dense": partial(layer, x), "laconic": partial(chain, x),
                "torch.sparse": partial(nn.functional.linear, x, csr, layer.bias),
            }  # fmt: skip
            with torch.no_grad():
                timed = race(ways, turns, 10.0, float("inf"))
            speeds = {f"{name}_ms": 1e3 * each.seconds for name, each in timed.items()}
            yield {"size": size, "batch": batch, "density": density, "speedup": timed["laconic"].speedup, **speeds}
