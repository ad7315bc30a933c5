"""`laconic.compress` on DDP: gradients travel through a codec while backward goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.exchange.hook import compress
from laconic.lab.records.record import Configuration
from laconic.lab.runs.strategies.base import Parts, Times, Trainee
from laconic.lab.runs.strategies.exchange import options_of, payload_of, take_records
from laconic.transports.world import World


class CompressTrainee(Trainee):
    """A DDP model with our hook."""

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        wrapped = DistributedDataParallel(module)
        super().__init__(chosen, wrapped, module, optimizer)
        self._job = compress(wrapped, chosen.codec, world=world, **options_of(chosen))

    def parts(self, times: Times) -> Parts:
        """The exchange runs beside backward, on a thread of its own: what backward takes longer is left over."""
        encode, wait, decode, sent = take_records(self._job)
        span, busy = times.backward - times.forward, encode + wait + decode
        share = min(1.0, span / busy) if busy else 1.0  # exchanges that overlap count the same second twice
        compute = times.forward - times.begun + times.ended - times.backward
        return Parts(compute, encode * share, wait * share, decode * share, sent)

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        return payload_of(self._job, self.chosen, name, parameter)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """DDP orders its buckets anew after the first backward, so that a resumed training would begin otherwise."""
        loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self._job.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._job.load_state_dict(state)
        self._job.records.clear()

    def close(self) -> None:
        self._job.close()
