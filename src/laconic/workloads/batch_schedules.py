"""The batch size over a training: constant, or growing instead of a falling learning rate.

Callers: `Workload`, `Task`, `laconic plan`. A schedule is frozen and has no state: the batch of an epoch follows from
the workload alone, so any (epoch, step) can be the first.

The noise of a step's gradient is in proportion to rate · samples / batch. What a falling rate does to it, a growing
batch does too, with fewer steps, each of which sends the same bytes.

Source: Smith, Kindermans, Ying, Le, Don't Decay the Learning Rate, Increase the Batch Size, ICLR 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic import specs
from laconic.errors import BadInput
from laconic.registry import Registry

REGISTRY: Registry[type[BatchSchedule]] = Registry("batch schedule")
SHARE = 10  # of the training samples that a batch grows to at most, as in the paper: a tenth


@dataclass(frozen=True)
class BatchSchedule:
    """The batch of every epoch, and the remaining change of the rate."""

    name: ClassVar[str] = ""

    def __str__(self) -> str:
        return specs.spec_of(self)

    def batches(self, batch: int, samples: int, rates: Sequence[float]) -> tuple[int, ...]:
        """Samples of a step, by epoch.

        Args:
            batch: of the first epoch.
            samples: of the training set.
            rates: the factor on the learning rate at the beginning of each epoch, as the workload plans it.
        """
        raise NotImplementedError

    def rate(self, planned: float, batch: int, first: int, progress: float) -> float:
        """The factor on the learning rate where the workload plans `planned`, `batch` samples, at first `first`."""
        raise NotImplementedError


@REGISTRY.register("constant")
@dataclass(frozen=True)
class Constant(BatchSchedule):
    """Every step has as many samples, and the rate is the workload's."""

    def batches(self, batch: int, samples: int, rates: Sequence[float]) -> tuple[int, ...]:
        return (batch,) * len(rates)

    def rate(self, planned: float, batch: int, first: int, progress: float) -> float:
        return planned


@REGISTRY.register("grow")
@dataclass(frozen=True)
class Grow(BatchSchedule):
    """The batch grows by what the rate would fall by, up to `most` samples; from there on the rate falls.

    With b(e) = min(most, b(0) · r(peak) / r(e)) samples in epoch e, the rate is r · b(e) / b(0). A rate that still
    rises, in a warm-up, leaves the batch as it is.

    >>> Grow().batches(128, 60_000, rates=[1.0, 0.8, 0.4, 0.2])
    (128, 160, 320, 640)
    >>> Grow(most=256).batches(128, 60_000, rates=[0.1, 1.0, 0.5, 0.1])
    (128, 128, 256, 256)

    Args:
        most: samples of a step; None is a tenth of the training samples.
        warm_up: the share of the training over which the rate rises from a tenth; large batches need it.

    Source: Smith et al., ICLR 2018, §3 and §5.1; the warm-up is that of Goyal et al., 2017.
    """

    most: int | None = None
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        if self.most is not None and (not isinstance(self.most, int) or self.most < 1):
            raise BadInput(f"grow: most is a number of samples from 1, got {self.most!r}")
        if not 0 <= self.warm_up < 1:
            raise BadInput(f"grow: warm_up is a share of the training from 0 to below 1, got {self.warm_up!r}")

    def batches(self, batch: int, samples: int, rates: Sequence[float]) -> tuple[int, ...]:
        most = max(batch, min(samples, self.most or samples // SHARE))
        peaks = itertools.accumulate(rates, max)
        return tuple(min(most, round(batch * peak / rate)) if rate > 0 else most
                     for rate, peak in zip(rates, peaks, strict=True))  # fmt: skip

    def rate(self, planned: float, batch: int, first: int, progress: float) -> float:
        rising = min(1.0, 0.1 + 0.9 * progress / self.warm_up) if self.warm_up else 1.0
        return rising * planned * batch / first


CONSTANT = Constant()


def batch_schedule(spec: str) -> BatchSchedule:
    """The schedule that a spec names.

    >>> str(batch_schedule("grow(2048)"))
    'grow(2048)'
    """
    return specs.build(REGISTRY, spec)
