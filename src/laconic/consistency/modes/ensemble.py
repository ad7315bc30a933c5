"""Train apart, predict together: whole models (ensemble), or heads on a trunk that all train (treenet)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.consistency.averaging import from_bytes, start_alike, to_bytes
from laconic.consistency.base import EXCHANGE_OPTIONS, Agreement, Mode, Setup, check_whole, register
from laconic.consistency.modes.sync import ExchangedGradients
from laconic.errors import BadInput, UnknownName
from laconic.exchange.collectives import all_gather
from laconic.transports.world import World


class Ensemble(nn.Module):
    """Several classifiers as one: log of the mean of their probabilities, so that it can stand in for their logits.

    p(y|x) = (1/m) Σᵢ softmax(fᵢ(x))_y; forward returns log p, whose softmax is p again. Members map a batch to logits,
    classes in the last dimension.

    >>> one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    >>> x = torch.ones(4, 2)
    >>> mean = (one(x).softmax(-1) + other(x).softmax(-1)) / 2
    >>> torch.allclose(Ensemble([one, other])(x).exp(), mean)
    True

    Source: Hansen and Salamon, Neural Network Ensembles, 1990.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not members:
            raise BadInput("an ensemble needs at least one member")
        self.members = nn.ModuleList(members)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        logs = torch.stack([member(*args, **options).log_softmax(-1) for member in self.members])
        return torch.logsumexp(logs, dim=0) - torch.log(torch.tensor(float(len(self.members))))


class Ensembling(Mode):
    """A mode whose workers train members of their own; member `keep` stays in the model."""

    alike: bool
    keep: int

    def shared(self, model: nn.Module) -> list[nn.Module]:
        """The modules that start from rank 0's weights even if members start differently."""
        return []


@register("ensemble")
@dataclass(frozen=True)
class TrainApart(Ensembling):
    """Every worker trains a member of its own and sends nothing; `finish` gathers them, and leaves one in the model.

    After `finish` the job's `ensemble` holds all members, the same on every worker, and the model itself holds member
    `keep`. Members begin alike and differ by the data they see; with `alike=false` each begins with its own weights,
    from its own seed, which is what makes most ensembles differ.

    Cost: nothing per step; once (P − 1) · all bytes of the model's state.

    Args:
        alike: begin with rank 0's weights.
        keep: which rank's member the model holds after `finish`.

    Source: Ben-Nun and Hoefler, Demystifying Parallel and Distributed Deep Learning, 2019, section 6.2 (ensembles).
    """

    alike: bool = True
    keep: int = 0

    summary: ClassVar[str] = "train apart; the members predict together after finish()"
    source: ClassVar[str] = "Hansen and Salamon, Neural Network Ensembles, 1990"
    examples: ClassVar[tuple[str, ...]] = ("ensemble",)
    same_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("ensemble", {"keep": self.keep}, 0, "a rank")

    @property
    def no_codec(self) -> str:
        return "it sends no gradients"

    def install(self, setup: Setup) -> EnsembleAgreement:
        return EnsembleAgreement(self, setup)


class EnsembleAgreement(Agreement):
    """Members that become an ensemble in `finish`: TrainApart at work, and the end of `treenet`."""

    def __init__(self, mode: Ensembling, setup: Setup) -> None:
        if mode.keep >= setup.world.world_size:
            raise BadInput(f"{mode.name}: keep={mode.keep}, but the ranks are 0 to {setup.world.world_size - 1}")
        self.mode = mode
        self.ensemble: Ensemble | None = None  # all members, by rank, after `finish`
        for part in [setup.model] if mode.alike else mode.shared(setup.model):
            start_alike(part, setup.world)
        super().__init__(setup)

    def after_step(self) -> None:
        if not self.records or self.records[-1].step != self.step:
            self.settle()  # nothing is sent

    def finish(self) -> None:
        """Gather all members into `ensemble`; the model becomes member `keep`."""
        with self.agreeing():
            members = gather_members(self.model, self.world)
            self.ensemble = Ensemble(members)
            if not self.alone:
                self.model.load_state_dict(members[self.mode.keep].state_dict())
        self.settle_finish()

    def predictor(self) -> nn.Module:
        return self.model if self.ensemble is None else self.ensemble


def gather_members(model: nn.Module, world: World) -> list[nn.Module]:
    """A copy of every worker's model, by rank; all workers must call it."""
    members = []
    for row in all_gather(to_bytes(model), group=world):
        member = copy.deepcopy(model)
        member.zero_grad(set_to_none=True)
        from_bytes(member, row)
        members.append(member)
    return members


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

    @property
    def lead(self) -> int:
        return 1

    def shared(self, model: nn.Module) -> list[nn.Module]:
        """The trunk: the children of `model` that all workers train together."""
        children = dict(model.named_children())
        if isinstance(self.split_at, str) and self.split_at not in children:
            raise UnknownName("child of the model", self.split_at, children)
        count = list(children).index(self.split_at) if isinstance(self.split_at, str) else self.split_at
        if not 1 <= count < len(children):
            text = f"1 to {len(children) - 1} of the model's {len(children)} children"
            raise BadInput(f"treenet shares the first, and not all: {text}, got {count}")
        return list(children.values())[:count]

    def install(self, setup: Setup) -> TreeNetAgreement:
        return TreeNetAgreement(self, setup)


class TreeNetAgreement(EnsembleAgreement, ExchangedGradients):
    """TreeNet at work; `ensemble` is the trunk with every worker's head, by rank."""

    mode: TreeNet

    def exchanged(self, setup: Setup) -> list[nn.Parameter]:
        trunk = {id(p) for child in self.mode.shared(setup.model) for p in child.parameters()}
        trained = [p for p in super().exchanged(setup) if id(p) in trunk and p.requires_grad]
        if not trained:
            raise BadInput("treenet: the optimiser trains nothing of the shared trunk")
        return trained
