"""Model averaging: workers train apart and average their weights periodically (local), with momentum on the mean
(block_momentum), or at the end (once)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.consistency.base import register
from laconic.consistency.blocks import BlockMode
from laconic.errors import BadInput


@register("local")
@dataclass(frozen=True)
class LocalMode(BlockMode):
    """Every worker trains alone for `period` steps; then all go on from the mean of their weights.

    wᵢ ← wᵢ − η∇f(wᵢ) at every step; after every `period`-th, wᵢ ← (1/m) Σⱼ wⱼ over the m workers. With a codec, what
    is sent is the difference to the last mean w̄, with error feedback: w̄ ← w̄ + (1/m) Σⱼ C(wⱼ − w̄), wᵢ ← w̄.

    Cost: one all-reduce of the weights every `period` steps: 1/period of the bytes of `sync`. `finish` leaves the exact
    mean, whatever the codec.

    Args:
        period: steps between two means.
        state: what becomes of the optimiser's state (momentum, Adam's moments) at a mean: keep each worker's own,
            average it (as many bytes again for each tensor in it), or forget it.
        fragments, delay, mix: see `diloco`.

    >>> str(LocalMode(16))
    'local(16)'

    Source: Zinkevich et al., Parallelized SGD, NeurIPS 2010; McMahan et al., FedAvg, AISTATS 2017; Stich, Local SGD
    Converges Fast and Communicates Little, ICLR 2019.
    """

    period: int = 8
    state: str = "keep"
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    summary: ClassVar[str] = "weights are averaged every few steps"
    source: ClassVar[str] = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019"
    examples: ClassVar[tuple[str, ...]] = ("local(8)",)

    def __post_init__(self) -> None:
        self.check_block()


@register("once")
@dataclass(frozen=True)
class Once(BlockMode):
    """Every worker trains alone from the same start; `finish` leaves the mean of all weights in every model.

    w = (1/m) Σᵢ wᵢ, at the end only. On convex problems this mean is better than any single wᵢ; deep networks that
    trained long apart may lie in different valleys, and their mean in none.

    Cost: one exact all-reduce of the weights in all. A codec is refused: there is no later exchange to make up for what
    it leaves out.

    Source: Zinkevich et al., Parallelized Stochastic Gradient Descent, NeurIPS 2010, Alg. 3.
    """

    summary: ClassVar[str] = "weights are averaged once, at the end"
    source: ClassVar[str] = "Zinkevich et al., Parallelized Stochastic Gradient Descent, NeurIPS 2010"
    examples: ClassVar[tuple[str, ...]] = ("once",)
    options: ClassVar[tuple[str, ...]] = ()

    @property
    def no_codec(self) -> str:
        return "it averages a single time, exactly, and nothing would make up for what a codec leaves out"


@register("block_momentum")
@dataclass(frozen=True)
class BlockMomentum(BlockMode):
    """Every worker trains alone for a block of `period` steps; the blocks' means move one global model, with momentum.

    With w̄ the mean of all workers' weights after a block that began at w_g:
    G = w̄ − w_g,  Δ ← μΔ + ζG,  w ← w + Δ; the next block begins at w_g = w, or at w_g = w + μΔ with `nesterov`.

    Without momentum this is `local`. A mean of m workers moves as far as one worker would, although it has seen m times
    the samples; μ = 1 − 1/m, the default, makes up for it: Δ sums to m times the block's gradient in the long run.

    Cost: one all-reduce every `period` steps, of G, through the codec with error feedback. `finish` ends the block
    under way, exactly, and leaves w.

    Args:
        period: steps a block.
        momentum: μ; none for 1 − 1/m. With one worker it is 0 whatever is given: the plain optimiser.
        nesterov: begin blocks where the momentum will carry the global model.
        learning_rate: ζ, the block learning rate.
        state: the optimiser's state at the end of a block: keep, average or forget (the paper's) it; see `local`.
        fragments, delay, mix: see `diloco`.

    >>> str(BlockMomentum(16, momentum=0.5))
    'block_momentum(16, momentum=0.5)'

    Source: Chen and Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block
    Parallel Optimization and Blockwise Model-Update Filtering, ICASSP 2016, eq. 3 to 6.
    Differs: a block is a number of steps, not a share of the data.
    """

    period: int = 8
    momentum: float | None = None
    nesterov: bool = False
    learning_rate: float = 1.0
    state: str = "forget"
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    summary: ClassVar[str] = "weights are averaged every few steps, with a momentum of the means"
    source: ClassVar[str] = "Chen and Huo, Blockwise Model-Update Filtering, ICASSP 2016"
    examples: ClassVar[tuple[str, ...]] = ("block_momentum(8)",)

    def __post_init__(self) -> None:
        self.check_block()
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise BadInput(f"block momentum is at least 0 and below 1, got {self.momentum}")
        if not self.learning_rate > 0:
            raise BadInput(f"the block learning rate is above zero, got {self.learning_rate}")

    def momentum_among(self, workers: int) -> float:
        """The effective μ for so many workers."""
        return 1 - 1 / workers if self.momentum is None or workers == 1 else self.momentum

    def held(self, start: Tensor) -> dict[str, Tensor]:
        return {"update": torch.zeros_like(start)}

    def merge(self, start: Tensor, mean: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        update, momentum = held["update"], self.momentum_among(workers)
        if workers == 1:
            torch.sub(mean, start, out=update)
            return mean
        model = start - momentum * update if self.nesterov else start  # a block begins so far ahead of the model
        update.mul_(momentum).add_(mean - start, alpha=self.learning_rate)
        model = model + update
        return model.add_(update, alpha=momentum) if self.nesterov else model

    def model(self, start: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        return start - self.momentum_among(workers) * held["update"] if self.nesterov else start
