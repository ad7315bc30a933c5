"""Train apart, predict together: every worker trains a model of its own, and the ensemble averages what they predict.

Callers: `distribute(consistency="ensemble")`. Nothing is sent before `finish`, which gathers all members.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.consistency.base import Agreement, Mode, Setup, check_whole, register
from laconic.consistency.weights import start_alike
from laconic.errors import BadInput
from laconic.exchange.collectives import all_gather
from laconic.transports.world import World


class Ensemble(nn.Module):
    """Several classifiers as one: log of the mean of their probabilities, so that it can stand in for their logits.

    p(y|x) = (1/m) Σᵢ softmax(fᵢ(x))_y; forward returns log p, whose softmax is p again.

    Args:
        members: modules that map a batch to logits, classes in the last dimension.

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
    """A mode whose workers have members of their own, `keep` of which stays in the model."""

    alike: bool
    keep: int

    def shared(self, model: nn.Module) -> list[nn.Module]:
        """What begins with rank 0's weights although members do not begin alike."""
        return []


@register("ensemble")
@dataclass(frozen=True)
class TrainApart(Ensembling):
    """Every worker trains a member of its own and sends nothing; `finish` gathers them, and leaves one in the model.

    After `finish` the agreement's `ensemble` holds all members, the same on every worker, and the model itself holds
    member `keep`. Members begin alike and differ by the data they see; with `alike=false` each begins with its own
    weights, from its own seed, which is what makes most ensembles differ.

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
    """Members that become an ensemble in `finish`: TrainApart at work, and the end of `treenet`.

    Attributes:
        ensemble: all members, by rank, after `finish`.
    """

    def __init__(self, mode: Ensembling, setup: Setup) -> None:
        if mode.keep >= setup.world.world_size:
            raise BadInput(f"{mode.name}: keep={mode.keep}, but the ranks are 0 to {setup.world.world_size - 1}")
        self.mode = mode
        self.ensemble: Ensemble | None = None
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
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in tensors]
    rows = all_gather(torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), group=world)
    members = []
    for row in rows:
        member = copy.deepcopy(model)
        member.zero_grad(set_to_none=True)
        held = [tensor.detach() for tensor in (*member.parameters(), *member.buffers())]
        for tensor, part in zip(held, torch.split(row, [p.numel() for p in parts]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        members.append(member)
    return members
