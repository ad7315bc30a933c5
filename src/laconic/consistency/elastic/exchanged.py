"""Vectors that members sum among themselves: by any schedule, through any codec, with error feedback on every leg.

Caller: `group.py`. The exchange is that of `compress` and `distribute` (`exchange/coded.py`), but here a step may fail.
So residuals are updated only when the step is committed, and they carry over to the next view, where the number of
members and every slice are different.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.casts import NoneCodec
from laconic.consistency.elastic.coded import NAME, load_kernels
from laconic.consistency.elastic.vectors import Occasion, Wire
from laconic.exchange.coded import Channel, Exchange, sizes
from laconic.exchange.collectives import plan_coded
from laconic.exchange.costs import GUESS, cheapest_coded
from laconic.exchange.residuals import PLAIN, Residuals, SideBySide
from laconic.storage.form import check_named
from laconic.transports.base import Transport, finish

_EXACT = NoneCodec()


class Exchanged(Wire):
    """The first `coded_numel` values through `codec`, the others as float32.

    With member i's vector xᵢ over nᵢ of N samples, all end with the same bits of Σᵢ nᵢ/N·xᵢ, up to what codecs leave
    out, which is kept and sent in the next step.

    Cost: that of the schedule; by `direct` each member sends and receives 2·(P − 1)/P of a payload. Three vectors of
    memory, one where nothing is fed back, and the messages.

    Args:
        decay: of what is fed back; see `Options.feedback_decay`.
        algorithm: of the exchange. "auto": `hierarchical` where some members share a host and others do not, else what
            is cheapest for this codec and so many members.
    """

    def __init__(
        self, codec: Codec, coded_numel: int, numel: int, algorithm: str = "auto", decay: float | None = None
    ) -> None:
        self.values = torch.empty(numel)
        self._codec, self._coded_numel, self._algorithm = codec, coded_numel, algorithm
        self._residuals = Residuals(decay=decay, tentative=True)
        self._plan: Exchange | None = None
        self._transport: Transport | None = None
        self._offered: int | None = None
        load_kernels(codec, coded_numel)
        load_kernels(_EXACT, numel - coded_numel)

    @property
    def offered(self) -> int | None:
        """The step for which `values` were last shared."""
        return self._offered

    def share(self, samples: int, occasion: Occasion, transport: Transport, hosts: tuple[int, ...]) -> Tensor:
        """Sum all members' `values` in place, weighted by samples; the caller then commits the step or repeats it.

        Args:
            transport: among the members of the view, and of no other.
            hosts: the host of each of them.

        Raises:
            PayloadError: what a peer sent cannot be read; `peer` is its rank.
        """
        self._offered = occasion.step
        if samples:
            self.values.mul_(samples / occasion.samples)
        else:
            self.values.zero_()
        if transport.world_size == 1:  # nobody to send to, and nothing to leave out
            self._residuals.settle(NAME, self.values[: self._coded_numel])
            return self.values
        if self._plan is None or self._transport is not transport:
            self._plan, self._transport = self._planned(transport, hosts), transport
        finish(self._plan.steps(occasion.step))
        return self.values

    def _planned(self, transport: Transport, hosts: tuple[int, ...]) -> Exchange:
        """Build the exchange among the members of a view; the first step sends the residual of the last view."""
        coded, exact = self.values[: self._coded_numel], self.values[self._coded_numel :]
        channels = []
        if coded.numel():
            residual = self._residuals.lay_out(SideBySide(((NAME, coded.numel()),)), self._codec)
            channels.append(Channel(coded, self._codec, residual or PLAIN))
        if exact.numel():
            channels.append(Channel(exact, _EXACT))
        algorithm = self._algorithm
        if algorithm == "auto" and 1 < len(set(hosts)) < len(hosts):
            algorithm = "hierarchical"
        if algorithm == "auto":
            algorithm = cheapest_coded(sizes(channels), transport.world_size, GUESS)
        return plan_coded(channels, transport, algorithm, hosts if algorithm == "hierarchical" else None)

    def renew(self) -> None:
        self._plan = None  # its messages may still be on their way

    def committed(self, included: bool) -> None:
        self._residuals.commit()

    def resume(self, step: int, included: bool) -> None:
        """Keep the residual if this worker had a part in the last committed step, else drop it.

        A step is committed when all have its sum."""
        if self._offered == step - 1 and included:
            self._residuals.commit()
        else:
            self._residuals.forget()

    def forget(self) -> None:
        self._residuals.forget()
        self._plan = self._offered = None

    def state_dict(self) -> dict[str, Tensor]:
        state = self._residuals.state_dict()
        return {"own": state[NAME]} if NAME in state else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_named(state, dict.fromkeys(("own", "mean"), self._coded_numel), "residuals")
        left = torch.stack(list(state.values())).sum(0) if state else None  # of either leg: a sum takes both
        self._residuals.load_state_dict({} if left is None else {NAME: left})
