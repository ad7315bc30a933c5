"""One worker's copy of everything that is trained, and that copy as one block of bytes for a newcomer.

Callers: `group.py` saves and loads it, `job.py` applies a step to it. The block's format is that of `storage/tree.py`.
Two replicas after the same steps hold the same bits; buffers (running means) are each worker's own between transfers,
as in `sync`.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from laconic.consistency.weights import FlatWeights, trained_parameters
from laconic.errors import PayloadError
from laconic.exchange.layout import Exemptions
from laconic.storage import tree
from laconic.workloads.order import SampleLedger


class Replica:
    """A model, its optimiser, an optional scheduler and the sample ledger.

    Args:
        scheduler: stepped after every committed step.
        exempt: the parameters that no codec touches, which then come last in `weights`; None: there is no codec.
        terms: what else must be equal on all workers, as the end of `signature`.

    Raises:
        BadInput: parameters that are not float32 on the CPU, or not the model's.

    Attributes:
        weights: the trained parameters.
        coded_numel: how many of the weights, from the first, a codec may touch.
        extra: what else a newcomer must have, by name: numbers, lists and tensors.
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
    def digest(self) -> int:
        """A checksum of the weights: equal bits, equal digest."""
        return digest(self.weights.values)

    @property
    def included(self) -> tuple[int, ...]:
        """The numbers of the workers whose vectors are in the last step; only kept where there is a codec."""
        return tuple(self.extra.get("included", ()))

    def step(self) -> None:
        """The optimiser steps by the gradients that are there, and the scheduler after it."""
        self.optimizer.step()
        self.forget_gradients()
        if self.scheduler is not None:
            self.scheduler.step()

    def forget_gradients(self) -> None:
        """No gradients, so that the next backward begins anew."""
        for parameter in self.weights.parameters:
            parameter.grad = None

    def save(self) -> Tensor:
        """Everything, as one uint8 tensor."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        extra = {"extra": self.extra} if self.extra else {}
        block = tree.dumps(
            {
                "weights": self.weights.values,
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
        """The reverse of `save`.

        Raises:
            PayloadError: not a block of this model's.
        """
        state = tree.loads(block.numpy().data)
        if state["weights"].shape != self.weights.values.shape:
            raise PayloadError(f"a state of {state['weights'].numel()} weights for a model of {self.numel}")
        with torch.no_grad():
            self.weights.values.copy_(state["weights"])
            frozen = [p for p in self.model.parameters() if not self._is_trained(p)]
            values = [*state["frozen"], *state["buffers"]]
            for tensor, value in zip([*frozen, *self.model.buffers()], values, strict=True):
                tensor.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.ledger.load(state["ledger"])
        self.extra = state.get("extra", {})

    def _is_trained(self, parameter: Tensor) -> bool:
        return any(parameter is each for each in self.weights.parameters)


def digest(values: Tensor) -> int:
    """A checksum of a vector's bits."""
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())
