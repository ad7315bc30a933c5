"""Synchronous training among workers of whom some may send anything: all gradients are gathered, a rule makes one.

Callers: `distribute(consistency="robust(krum, f=1)")`. Every worker gets every worker's gradient and applies the same
rule to the same bits, so nobody has to be trusted with the result. What is tolerated: up to f workers whose gradients
are wrong, on purpose or not: NaN, infinite, huge, reversed, or chosen with knowledge of all others'. What is not: a
worker that breaks the protocol itself, by silence (PeerLost, CollectiveTimeout) or by telling each peer something else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.consistency.base import Agreement, Mode, register, start_alike, trained_parameters
from laconic.consistency.robust import rules
from laconic.consistency.robust.kernels import finite_rows
from laconic.errors import BadInput, NonFiniteError, PayloadError
from laconic.exchange.collectives import all_gather
from laconic.exchange.flat import FlatGradients
from laconic.exchange.message import aligned, max_nbytes, pack, unpack
from laconic.exchange.policy import CodecPlan, CodecSchedule, exemptions
from laconic.exchange.residuals import Residuals
from laconic.transports.world import World


@register("robust")
@dataclass(frozen=True)
class Robust(Mode):
    """Every step takes what `rule` makes of all workers' gradients, up to f of which may be anything.

    A worker whose gradient is not finite, or whose payload cannot be decoded, is left out of the step; when more than f
    are, the step's gradient is zero. The f in force among n workers is min(f, the most the rule tolerates among n).

    Cost: an all-gather, (P − 1) · 4 bytes a parameter sent by each worker (or (P − 1) payloads of a codec), P/2 times
    what a ring's all-reduce sends; the rule's own cost is in `rules.py`.

    Args:
        rule: mean, median, trimmed_mean, krum, multi_krum, bulyan or geometric_median.
        f: how many workers may be Byzantine; none for as many as the rule tolerates among the workers there are.

    Raises:
        UnknownName: no such rule.
        BadInput: f is no number of workers; on `install`, too few workers for f.

    >>> str(Robust("krum", f=1)), rules.get("krum").least(1)
    ('robust(krum, f=1)', 5)

    Source: the rules', and Blanchard et al., Machine Learning with Adversaries, NIPS 2017.
    Differs: the paper has a trusted server; here every worker applies the rule itself.
    """

    rule: str = "median"
    f: int | None = None

    summary: ClassVar[str] = "a rule makes one gradient of all, up to f of which may be anything"
    source: ClassVar[str] = "Blanchard et al., Machine Learning with Adversaries, NIPS 2017"
    examples: ClassVar[tuple[str, ...]] = ("robust(median)", "robust(multi_krum)")

    def __post_init__(self) -> None:
        rules.get(self.rule)
        if self.f is not None and (not isinstance(self.f, int) or isinstance(self.f, bool) or self.f < 0):
            raise BadInput(f"robust: f is a number of workers, 0 or more, got {self.f!r}")

    def f_among(self, n: int) -> int | None:
        """The f in force among n workers; None where the rule has nothing to say about so few."""
        chosen = rules.get(self.rule)
        if n < chosen.base:
            return None
        return chosen.most(n) if self.f is None else min(self.f, chosen.most(n))

    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> RobustAgreement:
        if self.f is not None:
            rules.check(rules.get(self.rule), world.world_size, self.f)
        return RobustAgreement(self, model, optimizer, world, codec, **options)


class RobustAgreement(Agreement):
    """Robust at work.

    Args:
        exempt: parameters that no codec touches, as for `CompressionState`.

    Attributes:
        left_out: how often each rank's gradient was left out because it was not finite or could not be decoded.
    """

    def __init__(
        self, mode: Robust, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan,
        *, exempt: Any = None,
    ) -> None:  # fmt: skip
        trained = trained_parameters(model, optimizer)
        for parameter in trained:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                text = f"{parameter.dtype} on {parameter.device}"
                raise BadInput(f"robust rules combine float32 gradients on the CPU; a parameter is {text}")
        if codec == "auto":
            raise BadInput("robust gathers all gradients: codec 'auto' chooses for all-reduces; name a codec")
        if not any(parameter.requires_grad for parameter in trained):
            raise BadInput("robust: none of the optimiser's parameters needs a gradient")
        self.mode = mode
        self.schedule = CodecSchedule(codec)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        spared = exemptions(exempt)
        one_buffer = 4 * sum(p.numel() for p in trained) + 1
        self.gradients = FlatGradients(trained, one_buffer, lambda p: spared.covers(names[id(p)], p))
        held = self.gradients.buffers[0].parameters
        self.coded_numel = sum(p.numel() for p in held if not spared.covers(names[id(p)], p))
        self.residuals = Residuals()
        self.left_out = [0] * world.world_size
        start_alike(model, world)
        super().__init__(model, optimizer, world)

    def before_step(self) -> None:
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if any(p.grad is not None and not self.gradients.holds(p) for p in trained):
            raise BadInput("parameters with gradients were frozen at distribute(): unfreeze or add them before it")
        begun, sent = time.perf_counter(), self.world.transport.counters.total_sent_nbytes
        self.gradients.complete()
        buffer = self.gradients.buffers[0].values
        vectors = self._gather(buffer)
        gathered = time.perf_counter()
        f = self.mode.f_among(self.world.world_size)
        buffer.copy_(torch.from_numpy(rules.aggregate(self.mode.rule, vectors, f)))
        sent = self.world.transport.counters.total_sent_nbytes - sent
        self.record(time.perf_counter() - begun, gathered - begun, sent, staleness=0)

    def _gather(self, buffer: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
        """Every worker's gradient, one a row; NaN where there is none that can be read."""
        codec = self.schedule.at(self.step)
        if codec.exact:
            self.residuals.settle("coded", buffer[: self.coded_numel])
            vectors = all_gather(buffer, algorithm="direct", group=self.world)
        else:
            mine, room = self._message(buffer, codec)
            padded = torch.zeros(room, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            everyone = all_gather(padded, algorithm="direct", group=self.world)
            vectors = torch.stack([self._read(message, buffer.numel(), codec) for message in everyone])
        values = vectors.numpy()
        for rank, finite in enumerate(finite_rows(values)):
            self.left_out[rank] += not finite
        return values

    def _message(self, buffer: Tensor, codec: Codec) -> tuple[Tensor, int]:
        """This worker's payloads, coded and exact, and the room that any worker's message may take."""
        coded, exact = buffer[: self.coded_numel], buffer[self.coded_numel :]
        sizes = [codec.max_nbytes(coded.numel()), exact.nbytes]
        payload: Tensor | None = None
        if coded.numel():
            draws = self.step * self.world.world_size + self.world.rank
            out = torch.empty(aligned(sizes[0]), dtype=torch.uint8)
            try:
                payload = self.residuals.encode("coded", codec, coded, step=draws, out=out)
            except NonFiniteError:
                payload = None  # the others leave this worker out
        return pack([payload, exact.contiguous().view(torch.uint8)]), max_nbytes(sizes)

    def _read(self, message: Tensor, numel: int, codec: Codec) -> Tensor:
        """A worker's gradient from its message; NaN where the message is not what it should be."""
        row = torch.full((numel,), float("nan"))
        try:
            (payload, exact), _ = unpack(message, 2)
            if self.coded_numel and payload is not None:
                codec.decode(payload, self.coded_numel, out=row[: self.coded_numel])
            if exact is None or exact.numel() != 4 * (numel - self.coded_numel):
                raise PayloadError("the exact part has another length")
            row[self.coded_numel :] = exact.clone().view(torch.float32)
        except PayloadError:
            row.fill_(float("nan"))
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "left_out": list(self.left_out), "residuals": self.residuals.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if len(state["left_out"]) == self.world.world_size:
            self.left_out = [int(count) for count in state["left_out"]]
        self.residuals.load_state_dict(state["residuals"])

    def close(self) -> None:
        """Undo `distribute`: the optimiser steps alone again."""
        self.gradients.close()
        super().close()
