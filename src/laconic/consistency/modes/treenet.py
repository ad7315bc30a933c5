"""TreeNets: one trunk that all workers train together, and a head of each worker's own on top of it.

Callers: `distribute(consistency="treenet(2)")`. Communication happens in `optimizer.step()`, for the trunk alone: its
weights stay the same bits everywhere, the heads go their own ways, and together they are an ensemble that pays for its
first layers once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.consistency.base import EXCHANGE_OPTIONS, Setup, check_whole, register
from laconic.consistency.exchanged import ExchangedGradients
from laconic.consistency.modes.ensemble import EnsembleAgreement, Ensembling
from laconic.errors import BadInput, UnknownName


@register("treenet")
@dataclass(frozen=True)
class TreeNet(Ensembling):
    """The model's first `split_at` children are trained by the mean of all gradients, the rest by each worker's own.

    For a worker i with trunk t and head hᵢ: t ← step(t, (1/P) Σⱼ ∇ₜLⱼ), hᵢ ← step(hᵢ, ∇Lᵢ). After `finish` the
    agreement's `ensemble` predicts with all heads, and the model itself holds the trunk and head `keep`, on all alike.

    Cost: an all-reduce of the trunk's gradients a step; once the gathering of all heads.

    Args:
        split_at: how many of the model's children, from the first, are the trunk; or the name of the first that is not.
        alike: heads begin with rank 0's weights and differ by the data they see; false: each with its own.
        keep: which rank's head the model holds after `finish`.

    >>> str(TreeNet(2)), str(TreeNet("head", alike=False))
    ('treenet(2)', 'treenet(head, alike=false)')

    Source: Lee et al., Why M Heads are Better than One, 2015.
    Differs: the paper's heads see the same samples; here each sees its worker's, and `alike=false` is its random start.
    """

    split_at: int | str = 1
    alike: bool = True
    keep: int = 0

    summary: ClassVar[str] = "a trunk trained together, a head of each worker's own"
    source: ClassVar[str] = "Lee et al., Why M Heads are Better than One, 2015"
    examples: ClassVar[tuple[str, ...]] = ("treenet(1)",)
    options: ClassVar[tuple[str, ...]] = EXCHANGE_OPTIONS
    same_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.split_at, bool | float) or (isinstance(self.split_at, int) and self.split_at < 1):
            raise BadInput(f"treenet: split_at is a number of children, or a child's name, got {self.split_at!r}")
        check_whole("treenet", {"keep": self.keep}, 0, "a rank")

    def trunk(self, model: nn.Module) -> list[nn.Module]:
        """The children of `model` that all workers share.

        Raises:
            UnknownName: no child of this name.
            BadInput: nothing would be shared, or everything.
        """
        children = dict(model.named_children())
        if isinstance(self.split_at, str) and self.split_at not in children:
            raise UnknownName("child of the model", self.split_at, children)
        count = list(children).index(self.split_at) if isinstance(self.split_at, str) else self.split_at
        if not 1 <= count < len(children):
            text = f"1 to {len(children) - 1} of the model's {len(children)} children"
            raise BadInput(f"treenet shares the first, and not all: {text}, got {count}")
        return list(children.values())[:count]

    def shared(self, model: nn.Module) -> list[nn.Module]:
        return self.trunk(model)

    def install(self, setup: Setup) -> TreeNetAgreement:
        return TreeNetAgreement(self, setup)


class TreeNetAgreement(EnsembleAgreement, ExchangedGradients):
    """TreeNet at work; `ensemble` is the trunk with every worker's head, by rank."""

    mode: TreeNet

    def exchanged(self, setup: Setup) -> list[nn.Parameter]:
        trunk = {id(p) for child in self.mode.trunk(setup.model) for p in child.parameters()}
        trained = [p for p in super().exchanged(setup) if id(p) in trunk and p.requires_grad]
        if not trained:
            raise BadInput("treenet: the optimiser trains nothing of the shared trunk")
        return trained
