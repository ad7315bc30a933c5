"""Choose the cuts so that the slowest stage, or the slowest link, is as fast as possible.

Caller: `build.py`, for `cuts="auto"`. The model is cut at every layer, and each piece measured on a sample. A dynamic
programme then finds the cuts with the least bottleneck, and among those within 2 % of it the ones that send least.

    bottleneck = max over stages (forward + backward time),  over cuts (bytes that cross one way / bandwidth)

Without a sample nothing can be measured: then a piece's time is taken as its number of weights, and what crosses as the
number of tensors.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from laconic.codecs.device.streams import wait
from laconic.errors import BadInput
from laconic.parallel.boundary import Boundary, predicted_nbytes
from laconic.parallel.pipeline.cutting import Traced

GBIT_BPS = 125e6  # a link that nobody has measured is taken as 1 Gbit/s
SLACK = 1.02  # measured times differ by as much from run to run
_REPEATS = 3
Array = NDArray[np.float64]


def choose(
    traced: Traced, stages: int, boundary: Boundary, sample: Sequence[Tensor] | None, bandwidth_Bps: float = GBIT_BPS
) -> list[str]:
    """The names of the layers that begin stages 1, 2, …

    Raises:
        BadInput: there are fewer layers than stages.
    """
    places, names = zip(*traced.candidates().items(), strict=True) if traced.candidates() else ((), ())
    if len(places) < stages - 1:
        layers = ", ".join(dict.fromkeys(name for _, name in traced.layers))
        raise BadInput(f"{stages} stages need as many layers, and the model has {len(places) + 1}: {layers}")
    if sample is None:
        seconds, wires = _weights(traced, places), [float(_crossing(traced, place)) for place in places]
        slack, wire_counts = 1.0, False
    else:
        seconds, nbytes = _measure(traced, places, sample, boundary)
        wires, slack, wire_counts = [each / bandwidth_Bps for each in nbytes], SLACK, True
    found = cut(seconds, wires, stages, slack, wire_counts)
    return [names[index] for index in found]


def cut(
    seconds: Sequence[float], wires: Sequence[float], stages: int, slack: float = 1.0, wire_counts: bool = True
) -> list[int]:
    """The cuts, as indices of `wires`, with the least bottleneck; within `slack` of it, those with the least Σ wires.

    Args:
        seconds: of the pieces, in order.
        wires: the time that a cut before piece i + 1 needs on its link.
        wire_counts: whether a link can be the bottleneck.

    Cost: O(stages · pieces²).

    >>> cut([1, 1, 1, 3], [9, 0, 0], stages=2)
    [2]
    >>> cut([1, 1, 1, 1], [1, 1, 1], stages=3)
    [0, 1]
    """
    upto = np.concatenate([[0.0], np.cumsum(seconds, dtype=np.float64)])
    before = np.array([[0.0], *([each] for each in wires)])  # the link before a stage that begins with each piece
    stage_s = np.maximum(upto[1:] - upto[:-1, None], before if wire_counts else 0.0)  # by first and last piece
    stage_s[np.tril_indices(len(seconds), -1)] = math.inf
    limit = slack * _programme(stage_s, stages, np.maximum)[0]
    sent = np.where(stage_s > limit, math.inf, before)
    return [first - 1 for first in _programme(sent, stages, np.add)[1]]


def _programme(costs: Array, stages: int, join: np.ufunc) -> tuple[float, list[int]]:
    """The least cost of all pieces in so many stages, and the first piece of each stage but the first."""
    best, chosen = costs[0], list[NDArray[np.intp]]()  # of the pieces up to each
    for _ in range(1, stages):
        options = join(best[:-1, None], costs[1:])
        chosen.append(options.argmin(axis=0) + 1)
        best = options.min(axis=0)
    firsts, last = list[int](), len(costs)
    for firsts_by_last in reversed(chosen):
        last = int(firsts_by_last[last - 1])
        firsts.insert(0, last)
    return float(best[-1]), firsts


def _weights(traced: Traced, places: Sequence[int]) -> list[float]:
    """How many weights each piece has; one counted twice is in the first that has it."""
    seen: set[int] = set()
    found = []
    for piece in range(len(places) + 1):
        parameters = [p for p in traced.segment(places, piece).module.parameters() if id(p) not in seen]
        seen |= {id(p) for p in parameters}
        found.append(float(sum(p.numel() for p in parameters)))
    return found


def _crossing(traced: Traced, place: int) -> int:
    return len(traced.values([place]))


def _measure(
    traced: Traced, places: Sequence[int], sample: Sequence[Tensor], boundary: Boundary
) -> tuple[list[float], list[int]]:
    """Seconds of each piece, forward and backward, and the bytes that cross before each piece but the first.

    The model is left as it was: gradients, buffers and the generator of random numbers.
    """
    if len(sample) != len(traced.inputs):
        raise BadInput(f"sample holds the {len(traced.inputs)} inputs of a micro-batch, got {len(sample)}")
    buffers = [(each, each.clone()) for each in traced.model.buffers()]
    known: dict[str, Any] = dict(zip(traced.inputs, sample, strict=True))
    seconds = []
    with torch.random.fork_rng(devices=[]):
        for piece in range(len(places) + 1):
            segment = traced.segment(places, piece)
            args = [_leaf(known[name]) for name in segment.takes]
            try:
                times = [_timed(segment.module, args) for _ in range(_REPEATS)]
            except Exception as error:  # whatever a user's layers raise
                shapes, why = ", ".join(str(tuple(each.shape)) for each in sample), str(error).splitlines()[:1]
                raise BadInput(f"the model does not take the sample of {shapes}: {''.join(why)}") from error
            seconds.append(statistics.median(spent for spent, _ in times))
            known |= dict(zip(segment.gives, times[-1][1], strict=False))
    for buffer, value in buffers:
        buffer.copy_(value)
    sizes = {name: _nbytes(value, boundary) for name, value in known.items()}
    return seconds, [sum(sizes[value.name] for value in traced.values([place])) for place in places]


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _timed(module: fx.GraphModule, args: Sequence[Any]) -> tuple[float, tuple[Any, ...]]:
    """Seconds of a forward and a backward pass, and what came out."""
    _settle(args)
    begun = time.perf_counter()
    with torch.enable_grad():
        out: tuple[Any, ...] = module(*(arg * 1 if _trains(arg) else arg for arg in args))  # may change it in place
    roots = list(filter(_trains, tree_leaves(out)))
    leaves = [*filter(_trains, args), *filter(_trains, module.parameters())]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    _settle(tree_leaves(out))
    return time.perf_counter() - begun, out


def _settle(values: Sequence[Any]) -> None:
    """Wait until the devices of these tensors have finished their queued work."""
    for each in {value.device: value for value in values if isinstance(value, Tensor)}.values():
        wait(each)


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _nbytes(value: Any, boundary: Boundary) -> int:
    if not isinstance(value, Tensor):
        return 0
    if not value.is_floating_point():
        return value.nbytes
    return predicted_nbytes(boundary.forward, value.numel(), value.dtype)
