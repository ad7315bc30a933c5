"""`laconic.distribute`: workers agree in `optimizer.step()`, by any mode and codec."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from laconic.consistency.distribute import distribute
from laconic.consistency.modes.sync import SyncAgreement
from laconic.lab.records.record import Configuration
from laconic.lab.runs.strategies.base import Parts, Times, Trainee, wire_factor
from laconic.lab.runs.strategies.exchange import options_of, payload_of, take_records
from laconic.transports.world import World


class DistributeTrainee(Trainee):
    """A model whose optimiser trains together with the others."""

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, module, optimizer)
        self._job = distribute(module, optimizer, codec=chosen.codec, consistency=chosen.consistency, world=world,
                               **options_of(chosen))  # fmt: skip
        self._exchange = self._job.state if isinstance(self._job, SyncAgreement) else None

    def parts(self, times: Times) -> Parts:
        compute = times.backward - times.begun
        if self._exchange is not None:
            return Parts(compute, *take_records(self._exchange))
        last = self._job.records[-1]
        return Parts(compute, wait=last.wait_s, sent=float(last.sent_nbytes))

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        if self._exchange is None:
            return "none", 4.0 * parameter.numel() * wire_factor(self.chosen.workers)
        return payload_of(self._exchange, self.chosen, name, parameter)

    def staleness(self) -> list[int]:
        return [record.staleness for record in self._job.records if record.staleness is not None]

    def finish(self) -> None:
        self._job.finish()

    def close(self) -> None:
        self._job.close()
