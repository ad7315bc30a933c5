"""Few values for many weights: k-means by three starts, evenly spaced values, three values or two.

Callers: the pipeline, users. A method is a frozen dataclass in the registry `METHODS`, built from a spec such as
`kmeans(5)` or `ternary`; `share` gives it the weights that are left, and it gives back values and which weight has
which. Adding a method is adding a class with `@METHODS.register(name)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from laconic import specs
from laconic.errors import BadInput, UnknownName
from laconic.kernels import Array
from laconic.registry import Registry
from laconic.shrinking.parts import MOST_LEVELS, Shared, half

STARTS = ("density", "linear", "random")
_TURNS = 12


class SharingMethod(Protocol):
    """A way to share: the weights that are kept → sorted values, and for each weight the number of its value."""

    name: ClassVar[str]

    def values(self, kept: Array) -> tuple[Array, Array]:
        """Values (float32, ascending, none zero but for pruned ones) and numbers (int64); number −1 prunes."""


METHODS: Registry[type[Any]] = Registry("way to share weights")


def build(spec: str, bits: int | None = None) -> SharingMethod:
    """The method that a spec names; `bits` is used where the method has bits.

    >>> build("kmeans", 4)
    KMeans(bits=4, start='linear', rounds=50, seed=0)
    """
    name, _ = specs.split(METHODS.what, spec)
    if name not in METHODS.names():  # a plan may also share none
        raise UnknownName(METHODS.what, name, [*METHODS.names(), "none"])
    method: SharingMethod = specs.build(METHODS, spec)
    return replace(method, bits=bits) if bits is not None and hasattr(method, "bits") else method  # type: ignore[type-var]


def bits_in(spec: str) -> int | None:
    """The bits that a spec names, None where it leaves them open.

    >>> bits_in("kmeans(4)"), bits_in("kmeans(start=random)"), bits_in("ternary")
    (4, None, None)
    """
    named = any(key in (None, "bits") for key, _ in specs.split(METHODS.what, spec)[1])  # the first argument is bits
    return getattr(build(spec), "bits", None) if named else None


def share(weight: Tensor, method: SharingMethod, mask: Tensor | None = None, bit_price: float = 0.0) -> Shared:
    """A weight with few values; pruned where the mask says so.

    Args:
        bit_price: above 0, weights take values that are dearer in error and cheaper in bits; see `_cheaper`.

    >>> import torch
    >>> share(torch.tensor([[1.0, 1.1, -2.0, 0.3]]), build("kmeans(1)")).dense().tolist()
    [[0.7998046875, 0.7998046875, -2.0, 0.7998046875]]
    """
    dense = weight.detach().float().numpy()
    kept = mask.numpy() if mask is not None else np.ones(dense.shape, bool)
    if not np.isfinite(dense).all():
        raise BadInput("a weight is NaN or infinite: training has diverged; train the model at a lower rate")
    symbols = np.zeros(dense.shape, np.uint8)
    values, numbers = method.values(dense[kept]) if kept.any() else (np.zeros(0, np.float32), np.zeros(0, np.int64))
    if bit_price and values.size:
        values, numbers = _cheaper(dense[kept], values, numbers, dense.size, bit_price)
    symbols[kept] = numbers + 1
    return Shared(symbols, np.concatenate([np.zeros(1, np.float32), half(values)]))


@METHODS.register("kmeans")
@dataclass(frozen=True)
class KMeans:
    """2^bits centroids by Lloyd's algorithm, beside the zero of pruned weights; 255 for 8 bits.

    Minimises Σ (w − c(w))². Cost: `rounds` passes over sorted weights, k log n each.

    Args:
        bits: 1 to 8.
        start: "linear" spaces the first centroids evenly from the least weight to the largest, "density" by ranks,
            "random" takes some weights. Large weights are few and matter most: linear keeps centroids for them.
        rounds: at most.
        seed: of "random".

    Source: Han, Mao, Dally, Deep Compression, ICLR 2016, §3.
    """

    name: ClassVar[str]
    bits: int = 5
    start: str = "linear"
    rounds: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise BadInput(f"kmeans takes 1 to 8 bits, got {self.bits!r}")
        if self.start not in STARTS:
            raise UnknownName("start of kmeans", self.start, STARTS)

    def values(self, kept: Array) -> tuple[Array, Array]:
        """Centroids and assignments."""
        order = np.sort(kept.astype(np.float64))
        count = min(1 << self.bits, MOST_LEVELS, order.size)
        if self.start == "linear":
            centroids = np.linspace(order[0], order[-1], count)
        elif self.start == "density":
            centroids = order[((np.arange(count) + 0.5) / count * order.size).astype(np.int64)]
        else:
            centroids = np.sort(np.random.default_rng(self.seed).choice(order, count, replace=False))
        sums = np.concatenate([[0.0], np.cumsum(order)])
        for _ in range(self.rounds):
            cuts = np.searchsorted(order, (centroids[1:] + centroids[:-1]) / 2)
            cuts = np.concatenate([[0], cuts, [order.size]])
            sizes = np.diff(cuts)
            means = np.where(sizes > 0, np.diff(sums[cuts]) / np.maximum(sizes, 1), centroids)
            if np.array_equal(means, centroids):
                break
            centroids = means
        return _used(half(np.unique(centroids)), kept)


@METHODS.register("uniform")
@dataclass(frozen=True)
class Uniform:
    """Multiples of one step, 2^bits − 1 of them around zero, which is one of them: small weights are pruned as well.

    An entropy coder makes up for values that are seldom used, so that even spacing costs little.

    Source: Gish, Pierce, Asymptotically Efficient Quantizing, IEEE Trans. Information Theory 14(5), 1968.
    """

    name: ClassVar[str]
    bits: int = 5

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise BadInput(f"uniform takes 2 to 8 bits, got {self.bits!r}")

    def values(self, kept: Array) -> tuple[Array, Array]:
        """The multiples that occur."""
        most = (1 << self.bits - 1) - 1
        step = float(np.abs(kept).max()) / most or 1.0
        found, numbers = np.unique(np.rint(kept / step).astype(np.int64), return_inverse=True)
        return _without_zero(found * step, found, numbers)


@METHODS.register("ternary")
@dataclass(frozen=True)
class TernaryValues:
    """−a, 0, a: weights below 0.7 · mean |w| go, and a is the mean |w| of the others.

    Source: Li, Zhang, Liu, Ternary Weight Networks, 2016, equations 5 and 6.
    """

    name: ClassVar[str]

    def values(self, kept: Array) -> tuple[Array, Array]:
        """Two values, and −1 for what goes."""
        sizes = np.abs(kept)
        large = sizes > 0.7 * sizes.mean()
        a = float(sizes[large].mean()) if large.any() else 0.0
        numbers = np.where(large, (kept > 0).astype(np.int64), -1)
        return np.array([-a, a], np.float32), numbers


@METHODS.register("binary")
@dataclass(frozen=True)
class Binary:
    """−a and a, where a is the mean |w|.

    Source: Courbariaux, Bengio, David, BinaryConnect, NIPS 2015; Rastegari et al., XNOR-Net, ECCV 2016 (a).
    """

    name: ClassVar[str]

    def values(self, kept: Array) -> tuple[Array, Array]:
        """Two values."""
        a = float(np.abs(kept).mean())
        return np.array([-a, a], np.float32), (kept >= 0).astype(np.int64)


def _cheaper(kept: Array, values: Array, numbers: Array, numel: int, bit_price: float) -> tuple[Array, Array]:
    """Values and assignments that minimise Σ (w − v(w))² + λ · bits(v(w)) by turns, zero being one of the values.

    The bits of a value are −log₂ of the share of all `numel` weights that have it; λ is `bit_price` times the mean
    square error that the method left. Each turn assigns, then moves values to the means of their weights.

    Source: Chou, Lookabaugh, Gray, Entropy-Constrained Vector Quantization, IEEE Trans. ASSP 37(1), 1989.
    """
    order = np.sort(kept.astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(order)])
    found = np.append(values.astype(np.float64), 0.0)  # number −1, which prunes, is the last
    price = bit_price * float(np.square(kept - found[numbers]).mean())
    counts = np.bincount(np.where(numbers < 0, values.size, numbers), minlength=found.size)
    counts[-1] += numel - kept.size
    for _ in range(_TURNS):
        found, merged = np.unique(found[counts > 0], return_inverse=True)
        bits = -np.log2(np.bincount(merged, counts[counts > 0]) / numel)
        cuts = _cuts(found, price * bits)
        places = np.searchsorted(order, cuts)
        taken = np.diff(places)
        counts = taken + (found == 0) * (numel - kept.size)
        found = np.where((taken > 0) & (found != 0), np.diff(sums[places]) / np.maximum(taken, 1), found)
    used, numbers = np.unique(np.searchsorted(cuts[1:-1], kept, side="right"), return_inverse=True)
    return _without_zero(found[used], found[used], numbers)


def _cuts(values: Array, costs: Array) -> Array:
    """Where the cheapest of ascending values changes, from −∞ to ∞: by (w − value)² + cost; some may nowhere be it."""
    heights = values * values + costs
    later = np.triu(np.ones((values.size, values.size), bool), 1)
    gaps = np.where(later, values - values[:, None], 1.0)
    beats = np.where(later, (heights - heights[:, None]) / (2 * gaps), -np.inf)  # [i, k]: from here on k beats i
    first = np.where(later, np.maximum.accumulate(beats), np.inf).min(1)[:-1]  # some k > i beats all up to i
    return np.concatenate([[-np.inf], first, [np.inf]])


def _used(centroids: Array, kept: Array) -> tuple[Array, Array]:
    """The centroids nearest to some weight, and which weight has which; a centroid of zero prunes."""
    numbers = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, kept)
    found, numbers = np.unique(numbers, return_inverse=True)
    return _without_zero(centroids[found], centroids[found], numbers)


def _without_zero(values: Array, signs: Array, numbers: Array) -> tuple[Array, Array]:
    """Take the value zero out: its weights are pruned."""
    zero = np.flatnonzero(signs == 0)
    if zero.size:
        at = int(zero[0])
        numbers = np.where(numbers == at, -1, numbers - (numbers > at))
        values = np.delete(values, at)
    return values.astype(np.float32), numbers.reshape(-1)
