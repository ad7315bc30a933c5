"""How a batch is divided so that the quickest method fits the workspace.

Callers: the tuner. T(b) is the time an admitted method needs for b samples within the workspace; the best
division of n samples is

    best(0) = 0,    best(n) = min_b best(n − b) + T(b)

over the sizes b that a policy allows. A layer that is linear in its samples may be computed in any such pieces; the
gradient of the weights is the sum of the pieces' gradients.

Source: Oyama, Ben-Nun, Hoefler, Matsuoka, Accelerating Deep Learning Frameworks with Micro-batches (μ-cuDNN),
CLUSTER 2018, §III.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from laconic.errors import BadInput, UnknownName


def _powers(batch: int) -> list[int]:
    return sorted({batch, *(1 << i for i in range(batch.bit_length()) if 1 << i <= batch)})


POLICIES: Mapping[str, Callable[[int], list[int]]] = {
    "undivided": lambda batch: [batch],
    "powers": _powers,
    "all": lambda batch: list(range(1, batch + 1)),
}


def sizes(policy: str, batch: int) -> list[int]:
    """The sizes of pieces that a policy allows.

    >>> sizes("powers", 12)
    [1, 2, 4, 8, 12]

    Raises:
        UnknownName: no such policy.
    """
    if policy not in POLICIES:
        raise UnknownName("micro-batching policy", policy, POLICIES)
    return POLICIES[policy](batch)


def divide(batch: int, seconds: Mapping[int, float]) -> tuple[tuple[int, ...], float]:
    """The quickest division of a batch, largest pieces first, and its time.

    >>> divide(5, {1: 1.0, 2: 1.5, 5: 9.0})
    ((2, 2, 1), 4.0)

    Args:
        batch: samples to divide.
        seconds: T(b) for each size that fits.

    Raises:
        BadInput: no division of the batch into these sizes exists.
    """
    best: list[tuple[float, int]] = [(0.0, 0)]
    for n in range(1, batch + 1):
        best.append(min(((best[n - b][0] + t, b) for b, t in seconds.items() if b <= n), default=(float("inf"), 0)))
    if best[batch][0] == float("inf"):
        raise BadInput(f"no pieces of {sorted(seconds)} samples make up {batch}")
    pieces, left = [], batch
    while left:
        pieces.append(best[left][1])
        left -= best[left][1]
    return tuple(sorted(pieces, reverse=True)), best[batch][0]
