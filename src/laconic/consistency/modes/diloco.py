"""DiLoCo: workers train apart for many steps, and an outer optimiser steps the model by their mean movement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic.consistency.base import register
from laconic.consistency.blocks import BlockMode
from laconic.errors import BadInput


@register("diloco")
@dataclass(frozen=True)
class Diloco(BlockMode):
    """Every worker trains alone for `period` steps; their mean movement is the gradient of an outer optimiser.

    With θ the model of all, wᵢ the weights of worker i of m, H = `period`, η = `learning_rate`, μ = `momentum`, after
    every H steps:

        Δᵢ = θ − wᵢ,  g = (1/m) Σᵢ Δᵢ,  v ← μ·v + g,  θ ← θ − η·(g + μ·v),  wᵢ ← θ

    which is torch.optim.SGD(nesterov=True) on g; without `nesterov` the last is θ ← θ − η·v. Δᵢ travels through any
    codec, with error feedback.

    With P = `fragments` the parameters are cut, in the model's order, into P runs of whole parameters of about equal
    size. Run p is due at steps s with (s − ⌊p·H/P⌋) mod H = 0. With `delay` d, Δᵢ is sent at step s while training goes
    on, and at step s + d its mean steps θ, and wᵢ ← (1 − α)·θ + α·wᵢ with α = `mix`. With α = 0 the training
    of these d steps is lost. `eager` keeps some of it: the worker goes on from the θ that g − Δᵢ(s)/m + Δᵢ(s + d)/m
    would give, while θ itself is that of g, the same on all workers.

    Cost: one all-reduce of the weights every `period` steps, at most 1/`fragments` of it at once; three vectors as long
    as the weights, and with a delay two as long as a fragment.

    Args:
        period: H, steps between two outer steps of a fragment.
        fragments: P, how many parts of the model take turns.
        delay: d, steps between sending and the outer step; less than H/P, so that one fragment is under way.
        mix: α, a worker's own share of the weights that it goes on from.
        momentum: μ of the outer optimiser.
        learning_rate: η of the outer optimiser.
        nesterov: step by g + μ·v in place of v.
        eager: a worker's newest Δ stands for the one that it sent.
        state: the inner optimiser's state after a block: keep, average or forget it; see `local`.
        alone: take outer steps with one worker, too; without, one worker is the plain optimiser.

    Options of `distribute`, which all modes of blocks have:
        sites: the site of each rank, such as [0, 0, 1, 1]: a site is one worker i of the above. Its ranks average
            their gradients at every step, and each exchanges a share of Δᵢ with its counterparts in other sites.
        site_codec: through which the ranks of a site send gradients; without, they are sent as they are.

    Of `diloco` and its presets only:
        outer: makes the outer optimiser of a list of parameters, as any class of torch.optim does, in place of
            momentum, learning_rate and nesterov; `job.outer` is it.

    >>> str(Diloco(50, fragments=4, delay=5))
    'diloco(50, fragments=4, delay=5)'

    Source: Douillard et al., DiLoCo, 2023, Alg. 1; Douillard et al., Streaming DiLoCo with overlapping communication,
    2025, Alg. 2 (fragments, delay, mix); Kale et al., Eager Updates for Overlapped Communication and Computation in
    DiLoCo, 2025.
    Differs: fragments are runs of parameters, not of layers in strides; with `eager` the papers' workers have models of
    their own, here only what a worker goes on from is its own.
    """

    period: int = 100
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    momentum: float = 0.9
    learning_rate: float = 0.7
    nesterov: bool = True
    eager: bool = False
    state: str = "keep"
    alone: bool = False

    own_options: ClassVar[tuple[str, ...]] = (*BlockMode.own_options, "outer")
    summary: ClassVar[str] = "an outer optimiser steps by how far workers went in many steps, in fragments"
    source: ClassVar[str] = "Douillard et al., DiLoCo, 2023, and Streaming DiLoCo, 2025"
    examples: ClassVar[tuple[str, ...]] = (
        "diloco(8)",
        "diloco(8, fragments=2, delay=3, mix=0.5)",
        "diloco(8, delay=2, eager=true)",
    )

    def __post_init__(self) -> None:
        self.check_block()
        if not 0 <= self.momentum < 1:
            raise BadInput(f"diloco: momentum is at least 0 and below 1, got {self.momentum}")
        if not self.learning_rate > 0:
            raise BadInput(f"diloco: learning_rate, of the outer steps, is above zero, got {self.learning_rate}")

    def held(self, start: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(start)}

    def merge(self, start: Tensor, mean: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        gradient, velocity = start - mean, held["velocity"]
        if workers == 1 and not self.alone:
            velocity.copy_(gradient)
            return mean
        velocity.mul_(self.momentum).add_(gradient)
        moved = gradient.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        return start.sub(moved, alpha=self.learning_rate)


@register("streaming")
@dataclass(frozen=True)
class Streaming(Diloco):
    """A preset of `diloco`: four fragments, awaited five steps later, half of a worker's own weights, 4-bit floats.

    The formula and all options are those of `diloco`; `codec` is fp4(e3m0) where none is given.

    Cost: 4.06 bits a weight every `period` steps, a quarter of the weights at a time, beside the training.

    >>> str(Streaming(50))
    'streaming(50)'

    Source: Douillard et al., Streaming DiLoCo with overlapping communication, 2025, §2.
    """

    fragments: int = 4
    delay: int = 5
    mix: float = 0.5

    codec: ClassVar[str] = "fp4(e3m0)"
    summary: ClassVar[str] = "diloco in four fragments of 4-bit floats, awaited some steps later"
    source: ClassVar[str] = "Douillard et al., Streaming DiLoCo, 2025"
    examples: ClassVar[tuple[str, ...]] = ("streaming(8, fragments=2, delay=3)",)


@register("sparseloco")
@dataclass(frozen=True)
class SparseLoco(Diloco):
    """A preset of `diloco`: 192 of every 4096 values at two bits, with a decaying feedback in place of outer momentum.

    With e what a worker has not sent: e ← β·e + Δ, send C(e), e ← e − C(e), θ ← θ − η·mean(C(e)), β = 0.8 and η = 1.
    The options are those of `diloco`; `codec` is topk(192, bucket=4096)+int2 and `feedback_decay` β if none is given.

    Nothing but η makes steps longer: with `diloco`'s own momentum a lasting gradient counts 0.7/(1 − 0.9) = 7 times. So
    transformers trained by AdamW want `learning_rate` 4; with momentum SGD more than 1 may diverge. Where more than
    half of the values moved, as with a dense codec and when `finish` ends a block exactly, η is at most 1.

    Cost: 0.39 bits a weight every `period` steps; a residual as long as the weights.

    >>> str(SparseLoco(50))
    'sparseloco(50)'

    Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025.
    Differs: two bits are a sign and one of two means, see `int2`; β is for trainings of tens of outer steps.
    """

    period: int = 30
    momentum: float = 0.0
    learning_rate: float = 1.0
    nesterov: bool = False

    codec: ClassVar[str] = "topk(192, bucket=4096)+int2"
    feedback_decay: ClassVar[float | None] = 0.8
    summary: ClassVar[str] = "diloco by the largest 4.7 % of movements at 2 bits, without outer momentum"
    source: ClassVar[str] = "Sarfi et al., SparseLoCo, 2025"
    examples: ClassVar[tuple[str, ...]] = ("sparseloco(8)",)

    def merge(self, start: Tensor, mean: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        dense = 2 * int(torch.count_nonzero(mean != start)) > start.numel()
        steps = replace(self, learning_rate=min(1.0, self.learning_rate)) if dense else self
        return super(SparseLoco, steps).merge(start, mean, workers, held)
