"""One worker's copy of everything that is trained, and that copy as one block of bytes for a newcomer.

Callers: `group.py` saves and loads it, `job.py` applies a step to it. The block's format is that of `storage/tree.py`.
Two replicas after the same steps hold the same bits; buffers (running means) are each worker's own between transfers,
as in `sync`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.consistency.averaging import trained_parameters
from laconic.consistency.blocks import BlockMode, Blocks, consolidate_state
from laconic.consistency.master_weights import FlatWeights
from laconic.errors import PayloadError
from laconic.exchange.layout import Exemptions
from laconic.storage import tree
from laconic.storage.form import check_like, check_optimizer
from laconic.workloads.order import Parts, SampleLedger, count

_OF_MEMBERS = ("included", "paces")  # what differs with the members, in `extra`
_SECOND = 10**9


class Replica:
    """A model, its optimiser, an optional scheduler and the sample ledger.

    Args:
        exempt: the parameters that no codec touches, which then come last in `weights`; None: there is no codec.
        terms: what else must be equal on all workers, as the end of `signature`.

    Attributes:
        coded_numel: how many of the weights, from the first, a codec may touch.
        extra: what else a newcomer must have, by name: numbers, lists and tensors.
        common: the weights that all have agreed on, where each worker's own are others between two agreements.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ledger: SampleLedger,
        scheduler: Any = None,
        *,
        exempt: Exemptions | None = None,
        terms: str = "",
    ) -> None:
        self.model, self.optimizer, self.ledger, self.scheduler = model, optimizer, ledger, scheduler
        self.extra: dict[str, Any] = {}
        self.common: Tensor | None = None
        self._terms = terms
        trained, self.coded_numel = trained_parameters(model, optimizer), 0
        if exempt is not None:
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            spared = {id(parameter): exempt.covers(names[id(parameter)], parameter) for parameter in trained}
            trained.sort(key=lambda parameter: spared[id(parameter)])
            self.coded_numel = sum(parameter.numel() for parameter in trained if not spared[id(parameter)])
        self.weights = FlatWeights(trained)

    @property
    def numel(self) -> int:
        """Values of a gradient."""
        return self.weights.values.numel()

    @property
    def signature(self) -> str:
        """What must be equal on all workers, as text: the data, their division and the parameters' names and shapes."""
        trained = {id(parameter) for parameter in self.weights.parameters}
        shapes = [(name, list(p.shape)) for name, p in self.model.named_parameters() if id(p) in trained]
        kind, ledger = type(self.optimizer).__name__, self.ledger
        crc = zlib.crc32(json.dumps(shapes).encode())
        data = f"{ledger.samples} samples in batches of {ledger.batch} by seed {ledger.seed}"
        return f"{self.numel} parameters ({crc:08x}) by {kind}, {data}{self._terms}"

    @property
    def included(self) -> tuple[int, ...]:
        """The workers whose vectors are in the last step; only kept with a codec."""
        return tuple(self.extra.get("included", ()))

    @property
    def paces(self) -> dict[int, int]:
        """Nanoseconds a sample, by member, that steps are divided by; nothing where shares are equal."""
        return dict(self.extra.get("paces", ()))

    def follow(self, paces: Mapping[int, int]) -> None:
        """Take over the members' latest speed, a quarter of it at a time; all do so with the same numbers."""
        if paces:
            known = self.paces
            self.extra["paces"] = [[m, (3 * known.get(m, pace) + pace) // 4] for m, pace in sorted(paces.items())]

    def step(self) -> None:
        """Step the optimiser by the present gradients, then the scheduler."""
        self.optimizer.step()
        self.forget_gradients()
        if self.scheduler is not None:
            self.scheduler.step()

    def forget_gradients(self) -> None:
        """Clear the gradients before the next backward."""
        for parameter in self.weights.parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def agreed(self) -> Iterator[Tensor]:
        """The weights that all have agreed on; between two agreements only."""
        with self.weights.current() as values:
            yield values if self.common is None else self.common

    def save(self) -> Tensor:
        """Everything, as one uint8 tensor."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        extra = {"extra": self.extra} if self.extra else {}
        with self.agreed() as values:
            block = tree.dumps(
                {
                    "weights": values,
                    "frozen": [p.detach() for p in self.model.parameters() if not self._is_trained(p)],
                    "buffers": list(self.model.buffers()),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": scheduler,
                    "ledger": self.ledger.state(),
                    **extra,
                }
            )
        return torch.frombuffer(block, dtype=torch.uint8)

    def load(self, block: Tensor) -> None:
        """Load what `save` returned; PayloadError, with nothing loaded, if it is not of this model."""
        state = tree.loads(block.numpy().data)
        frozen = [p for p in self.model.parameters() if not self._is_trained(p)]
        buffers = list(self.model.buffers())
        optimizer, ledger = self.optimizer.state_dict(), self.ledger.state()
        try:
            check_like(state, {
                "weights": self.weights.values, "frozen": frozen, "buffers": buffers, "optimizer": None,
                "scheduler": None, "ledger": {},
            })  # fmt: skip
            extra = state.get("extra", {})
            check_like(extra, {name: kept for name, kept in self.extra.items() if name not in _OF_MEMBERS})
            check_like(paces := extra.get("paces", []), [[0, 0]] * len(paces), "paces")
            check_like(included := extra.get("included", []), [0] * len(included), "included")
            check_optimizer(state["optimizer"], self.optimizer, "the optimiser's state")
            self.ledger.load(state["ledger"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None and state["scheduler"] is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except Exception as error:  # an optimiser of the user's may raise anything
            self.optimizer.load_state_dict(optimizer)
            self.ledger.load(ledger)
            raise PayloadError(f"a state of another model, or damaged: {error}") from error
        with torch.no_grad():
            self.weights.load_state_dict({"values": state["weights"]})
            self.weights.write()
            if self.common is not None:
                self.common.copy_(state["weights"])
            values = [*state["frozen"], *state["buffers"]]
            for tensor, value in zip([*frozen, *buffers], values, strict=True):
                tensor.copy_(value)
        self.extra = extra

    def _is_trained(self, parameter: Tensor) -> bool:
        return any(parameter is each for each in self.weights.parameters)


def digest(values: Tensor) -> int:
    """A checksum of a vector's bits."""
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def _at(shares: list[Tensor], place: int) -> Tensor:
    """A member's share; nothing for one that joined after the samples were divided."""
    return shares[place] if place < len(shares) else shares[0][:0]


class StepWork:
    """Work that agrees on the gradient at every step."""

    period = 1  # the most steps from one agreement to the next

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.samples = self.of_all = 0  # this worker's and all workers', in what is agreed on next

    @property
    def made(self) -> int:
        """Steps made here but not agreed on yet: they are lost if a member is lost."""
        return 0

    @property
    def committed(self) -> Tensor:
        """The weights after the last agreement."""
        with self._replica.weights.current() as values:
            return values

    def division(self, ids: Sequence[int]) -> Parts:
        """How a step is divided among these members: equally, or by the speed that all know of."""
        paces = self._replica.paces
        if not paces.keys() & set(ids):
            return len(ids)
        usual = sorted(paces.values())[len(paces) // 2]
        return tuple(max(1, _SECOND // paces.get(member, usual)) for member in ids)

    def be_alone(self, alone: bool) -> None:
        """Say whether the next vector is that of a view's only member, which sends it to nobody."""

    def share(self, parts: Parts, place: int) -> Tensor:
        """The samples of this worker's next step, as the one at `place` of `parts` members; else none."""
        shares = self._replica.ledger.shares(parts)
        own = _at(shares, place)
        self.samples, self.of_all = len(own), sum(map(len, shares))
        return own

    def step(self) -> bool:
        """Do this worker's own part of the step; return whether it is time to agree."""
        return True

    def write(self, out: Tensor) -> None:
        """Write this worker's vector."""
        self._replica.weights.gradients(out)

    def apply(
        self, result: Tensor, parts: Parts, included: tuple[int, ...], paces: Mapping[int, int] | None = None
    ) -> None:
        """Apply the agreed vector, to which the members at the places `included` contributed.

        Args:
            paces: nanoseconds a sample, by member; later steps are divided by them.
        """
        self._apply(result, parts, included)
        self._replica.follow(paces or {})

    def _apply(self, result: Tensor, parts: Parts, included: tuple[int, ...]) -> None:
        self._replica.weights.set_gradients(result)
        self._replica.step()
        self._replica.ledger.commit(parts, included)

    def abandon(self) -> None:
        """Go back to the last agreement."""
        self._replica.forget_gradients()


class BlockWork(StepWork):
    """Work that trains `period` steps, or fewer at the end of an epoch, then applies `mode.merge` to the mean weights.

    The mean counts each member by its samples: w̄ = Σᵢ nᵢ·wᵢ / N, with nᵢ of the block's N samples at member i.

    Cost: a copy of the weights and of the optimiser's state a block, to go back to.

    `relative`: see `Blocks`. A member alone offers its weights themselves, so that who repeats the block has its bits.
    """

    def __init__(self, replica: Replica, mode: BlockMode, *, relative: bool) -> None:
        assert mode.period is not None
        super().__init__(replica)
        self._mode, self.period, self._relative = mode, mode.period, relative
        self._blocks = Blocks(mode, replica.weights.values, relative=relative, repeated=True)
        self._saved: tuple[Any, Any] | None = None
        self._shares: list[list[Tensor]] = []
        self._place = 0
        replica.extra |= {"steps": 0, **self._blocks.held}

    def be_alone(self, alone: bool) -> None:
        self._blocks.relative = self._relative and not alone

    @property
    def made(self) -> int:
        return self._blocks.made

    @property
    def committed(self) -> Tensor:
        return self._blocks.start if self.made else super().committed

    def share(self, parts: Parts, place: int) -> Tensor:
        if not self.made:
            self._begin(parts, place)
        return _at(self._shares[self.made], place)

    def _begin(self, parts: Parts, place: int) -> None:
        """Divide the next block's samples, and save the present state to go back to."""
        replica = self._replica
        self._shares, self._place = replica.ledger.block(parts, self._length()), place
        self.samples = sum(len(_at(shares, place)) for shares in self._shares)
        self.of_all = sum(len(share) for shares in self._shares for share in shares)
        with replica.weights.current():
            self._open()
        scheduler = None if replica.scheduler is None else replica.scheduler.state_dict()
        kept = tree.map_tensors(replica.optimizer.state_dict(), Tensor.clone)
        self._saved = (kept, copy.deepcopy(scheduler))

    def _length(self) -> int:
        """The most steps of the next block."""
        return self.period

    def _open(self) -> None:
        """Begin a block at the present weights."""
        self._blocks.begin()

    def _go_back(self) -> None:
        """Let the weights be as they were when the block began."""
        self._blocks.abandon()

    def _merge(self, result: Tensor, workers: int) -> Sequence[Tensor]:
        """End a block with the mean of all offers; return the parameters that were agreed on."""
        self._blocks.merge(result, workers)
        return self._replica.weights.parameters

    def step(self) -> bool:
        if len(_at(self._shares[self.made], self._place)):
            self._replica.step()
        else:
            self._skip(1)
        self._blocks.made += 1
        return self.made == len(self._shares)

    def _skip(self, steps: int) -> None:
        """Skip steps without samples, or made without this worker: only the learning rate advances."""
        for _ in range(steps if self._replica.scheduler is not None else 0):
            self._replica.scheduler.step()

    def write(self, out: Tensor) -> None:
        with self._replica.weights.current():
            self._blocks.offer(out)

    def _apply(self, result: Tensor, parts: Parts, included: tuple[int, ...]) -> None:
        replica, blocks, made = self._replica, self._blocks, self.made
        length = self._length()
        steps = len(replica.ledger.block(parts, length))
        with replica.weights.current():
            if not made:
                self._open()  # made without this worker, which had not begun
            blocks.held = {name: replica.extra[name] for name in blocks.held}  # a newcomer has its peer's
            agreed_on = self._merge(result, count(parts))
            blocks.made = 0
        if count(parts) > 1:
            consolidate_state(self._mode.state, replica.optimizer, replica.weights, parameters=agreed_on)
        self._skip(steps - made)
        replica.ledger.commit(parts, included, length)
        replica.extra["steps"] += steps
        self._saved = None

    def abandon(self) -> None:
        """Weights, optimiser and scheduler as they were at the block's start."""
        replica = self._replica
        super().abandon()
        if self.made and self._saved is not None:
            optimizer, scheduler = self._saved
            with replica.weights.current():
                self._go_back()
            replica.optimizer.load_state_dict(optimizer)
            if replica.scheduler is not None:
                replica.scheduler.load_state_dict(scheduler)
        self._blocks.made, self._saved = 0, None
