"""Blocks of changing members that agree on one fragment of the model at a time, and the wire for fragments.

Caller: `door.py`. With H the period and P fragments, members agree on fragment (k + 1) mod P after ⌊(k + 1)·H/P⌋ steps,
as fixed ranks do (`blocks.py`), and each such agreement is committed, or its H/P steps are made again. In between, a
worker's own weights differ from θ, which all have agreed on: θ is what newcomers get, and what checksums are of. The
last agreement of an epoch is on all fragments, after which all workers hold the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from laconic.codecs import Codec
from laconic.consistency.blocks import BlockMode
from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.replica import BlockWork, Replica
from laconic.consistency.elastic.vectors import Occasion
from laconic.consistency.fragments import WHOLE, fragments_of
from laconic.transports.base import Transport


class ByFragment(Exchanged):
    """A wire for each part that members agree on, each with residuals of its own."""

    def __init__(self, codec: Codec, coded_numel: int, parts: Sequence[slice], algorithm: str, decay: float | None):
        self._parts = [
            Exchanged(codec, max(0, min(part.stop, coded_numel) - part.start), part.stop - part.start, algorithm, decay)
            for part in parts
        ]
        self.turn_to(0)

    def turn_to(self, number: int) -> None:
        """Let the next vector be of this part."""
        self._present = self._parts[number]
        self.values = self._present.values

    def share(self, samples: int, occasion: Occasion, transport: Transport, hosts: tuple[int, ...]) -> Tensor:
        return self._present.share(samples, occasion, transport, hosts)

    def renew(self) -> None:
        for part in self._parts:
            part.renew()

    def committed(self, included: bool) -> None:
        self._present.committed(included)

    def resume(self, step: int, included: bool) -> None:
        if self._present.offered == step - 1 and included:
            self._present.resume(step, included)
        else:
            for part in self._parts:
                part.resume(step, included=False)

    def forget(self) -> None:
        for part in self._parts:
            part.forget()

    def state_dict(self) -> dict[str, Tensor]:
        found = {f"{number}/{k}": v for number, part in enumerate(self._parts) for k, v in part.state_dict().items()}
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for number, part in enumerate(self._parts):
            own = {name.partition("/")[2]: each for name, each in state.items() if name.startswith(f"{number}/")}
            part.load_state_dict(own)


class FragmentWork(BlockWork):
    """Work of a mode with fragments, or with `mix`: workers go on from weights of their own.

    Cost: beside that of blocks, another copy of the weights to go back to, and a vector for each fragment and for all.
    """

    def __init__(self, replica: Replica, mode: BlockMode, *, relative: bool) -> None:
        super().__init__(replica, mode, relative=relative)
        assert mode.period is not None
        self._whole_period, self.period = mode.period, -(-mode.period // mode.fragments)
        self.fragments = fragments_of(replica.weights.parameters, mode.fragments, mode.period)
        self.wire: ByFragment | None = None
        self._own = replica.weights.values[:0]  # this worker's weights at the block's start
        replica.common = self._blocks.start
        replica.extra["fragments"] = 0  # agreements since the last one on all

    @property
    def parts(self) -> list[slice]:
        """What members agree on, by turn: each fragment, and all."""
        return [*(each.part for each in self.fragments), slice(0, self._replica.numel)]

    @property
    def committed(self) -> Tensor:
        return self._blocks.start

    @property
    def turn(self) -> int:
        """What the next agreement is on, as a place in `parts`."""
        ledger = self._replica.ledger
        samples = sum(len(shares[0]) for shares in ledger.block(1, self._length()))
        if samples == ledger.remaining:
            return len(self.fragments)
        return (self._agreed + 1) % len(self.fragments)

    @property
    def _agreed(self) -> int:
        return int(self._replica.extra["fragments"])

    def _length(self) -> int:
        due = [made * self._whole_period // len(self.fragments) for made in (self._agreed, self._agreed + 1)]
        return due[1] - due[0]

    def _open(self) -> None:
        if not self._agreed:
            self._blocks.begin()  # all have the same weights
        self._own = self._blocks.values.clone()
        if self.wire is not None:
            self.wire.turn_to(self.turn)

    def _go_back(self) -> None:
        self._blocks.values.copy_(self._own)

    def write(self, out: Tensor) -> None:
        with self._replica.weights.current():
            self._blocks.offer(out, self.parts[self.turn])

    def _merge(self, result: Tensor, workers: int) -> Sequence[Tensor]:
        turn, blocks = self.turn, self._blocks
        if turn < len(self.fragments):
            blocks.merge(result, workers, self.parts[turn])
            self._replica.extra["fragments"] += 1
            return self.fragments[turn].parameters
        blocks.merge(result, workers, WHOLE)
        blocks.values.copy_(blocks.start)
        self._replica.extra["fragments"] = 0
        return self._replica.weights.parameters
