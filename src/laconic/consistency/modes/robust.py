"""Synchronous training with Byzantine workers: gather all gradients, and let a robust rule combine them.

Every worker gets every worker's gradient and applies the same rule to the same bits, so nobody has to be trusted with
the result. What is tolerated: up to f workers whose gradients are wrong, on purpose or not: NaN, infinite, huge,
reversed, or chosen with knowledge of all others'. What is not: a worker that breaks the protocol itself, by silence
(PeerLost, CollectiveTimeout) or by telling each peer something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.codecs.plans import PlannedCodec
from laconic.consistency.averaging import start_alike, trained_parameters
from laconic.consistency.base import Agreement, Mode, Setup, check_whole, register
from laconic.consistency.elastic.coded import NAME, CodedVector
from laconic.consistency.master_weights import check_types
from laconic.consistency.robust import rules
from laconic.consistency.robust.kernels import finite_rows
from laconic.errors import BadInput, PayloadError
from laconic.exchange.coded import max_nbytes, pack, unpack
from laconic.exchange.collectives import all_gather
from laconic.exchange.host_copies import HostCopies, twins_of
from laconic.exchange.layout import FlatGradients
from laconic.exchange.residuals import Residuals
from laconic.storage.form import check_like


@register("robust")
@dataclass(frozen=True)
class Robust(Mode):
    """Every step applies `rule` to all workers' gradients, up to f of which may be arbitrary.

    A worker whose gradient is not finite, or whose payload cannot be decoded, is left out of the step; when more than f
    are, the step's gradient is zero. The f in force among n workers is min(f, the most the rule tolerates among n).

    Cost: an all-gather, (P − 1) · 4 bytes a parameter sent by each worker (or (P − 1) payloads of a codec), P/2 times
    what a ring's all-reduce sends; the rule's own cost is in `rules.py`.

    Args:
        rule: mean, median, trimmed_mean, krum, multi_krum, bulyan or geometric_median.
        f: how many workers may be Byzantine; none for as many as the rule tolerates among the workers there are.

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
    options: ClassVar[tuple[str, ...]] = ("exempt",)

    def __post_init__(self) -> None:
        rules.get(self.rule)
        if self.f is not None:
            check_whole("robust", {"f": self.f}, 0, "a number of workers")

    @property
    def lead(self) -> int:
        return 1

    def f_among(self, n: int) -> int | None:
        """The f in force among n workers; None if the rule is undefined for so few."""
        chosen = rules.get(self.rule)
        if n < chosen.base:
            return None
        return chosen.most(n) if self.f is None else min(self.f, chosen.most(n))

    def combine(self, rows: Tensor) -> Tensor:
        """Apply the rule to all workers' vectors, one per row."""
        return torch.from_numpy(rules.aggregate(self.rule, rows.numpy(), self.f_among(len(rows))))

    def check_workers(self, workers: int) -> None:
        """Refuse too few workers for the rule to tolerate f."""
        if self.f is not None:
            rules.check(rules.get(self.rule), workers, self.f)

    def install(self, setup: Setup) -> RobustAgreement:
        self.check_workers(setup.world.world_size)
        return RobustAgreement(self, setup)


class RobustAgreement(Agreement):
    """Robust at work.

    Attributes:
        left_out: how often each rank's gradient was left out because it was not finite or could not be decoded.
    """

    def __init__(self, mode: Robust, setup: Setup) -> None:
        model, exempt = setup.model, setup.options.exemptions
        trained = trained_parameters(model, setup.optimizer)
        check_types(trained)
        if setup.codec == "auto":
            raise BadInput("robust gathers all gradients: codec 'auto' chooses for all-reduces; name a codec")
        if not any(parameter.requires_grad for parameter in trained):
            raise BadInput("robust: none of the optimiser's parameters needs a gradient")
        self.mode, self.plan, self.residuals = mode, PlannedCodec(setup.codec), Residuals()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        one_buffer = 4 * sum(p.numel() for p in trained) + 1
        self.gradients = FlatGradients(trained, one_buffer, lambda p: exempt.covers(names[id(p)], p))
        self.vector = GradientVector(self.gradients, lambda p: exempt.covers(names[id(p)], p))
        self.left_out = [0] * setup.world.world_size
        start_alike(model, setup.world)
        super().__init__(setup)
        self.parts["residuals"] = self.residuals
        self.resources.callback(self.gradients.close)

    def before_step(self) -> None:
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if any(p.grad is not None and not self.gradients.holds(p) for p in trained):
            raise BadInput("parameters with gradients were frozen at distribute(): unfreeze or add them before it")
        with self.agreeing():
            begun = time.perf_counter()
            self.gradients.complete()
            rows = self._gather(self.vector.fetch())
            for rank, finite in enumerate(finite_rows(rows.numpy())):
                self.left_out[rank] += not finite
            self.waited(time.perf_counter() - begun)
            self.vector.send(self.mode.combine(rows))
        self.settle(staleness=0)

    def _gather(self, buffer: Tensor) -> Tensor:
        """Gather every worker's gradient, one per row; NaN where it cannot be read."""
        codec = self.plan.at(self.step)
        if codec.exact:
            self.residuals.settle(NAME, buffer[: self.vector.coded_numel])
            return all_gather(buffer, algorithm="direct", group=self.world)
        coded = CodedVector(codec, self.vector.coded_numel, buffer.numel())
        draw = self.step * self.world.world_size + self.world.rank
        mine = pack([coded.encode(buffer, self.residuals, draw)])
        padded = torch.zeros(max_nbytes([coded.max_nbytes]), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        everyone = all_gather(padded, algorithm="direct", group=self.world)
        return torch.stack([_read(message, coded) for message in everyone])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "left_out": list(self.left_out)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        self.residuals.check_state(state["residuals"], {NAME: self.vector.coded_numel})
        check_like(state.get("left_out", []), [0] * len(state.get("left_out", [])), "left_out")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if len(state.get("left_out", [])) == self.world.world_size:
            self.left_out = list(state["left_out"])


class GradientVector:
    """All gradients as one float32 vector in the processor's memory, exempt ones at its end.

    Where they lie in one float32 buffer of that memory, the buffer is the vector.
    """

    def __init__(self, gradients: FlatGradients, exempt: Callable[[nn.Parameter], bool]) -> None:
        buffers = gradients.buffers
        coded = [sum(p.numel() for p in buffer.parameters if not exempt(p)) for buffer in buffers]
        first = [buffer.values[:numel] for buffer, numel in zip(buffers, coded, strict=True)]
        parts = [*first, *(buffer.values[numel:] for buffer, numel in zip(buffers, coded, strict=True))]
        self.coded_numel, self._copies = sum(coded), HostCopies()
        away = [part for part in parts if not part.is_cpu]
        self._pairs = list(zip(away, twins_of(away), strict=True))
        twins = {id(part): twin for part, twin in self._pairs}
        self._here = [twins.get(id(part), part) for part in parts]
        alone = buffers[0].values
        same = len(buffers) == 1 and alone.is_cpu and alone.dtype == torch.float32
        self._values = alone if same else torch.empty(sum(part.numel() for part in parts))
        self._same = same

    def fetch(self) -> Tensor:
        """Return the vector of the present gradients."""
        if not self._same:
            self._copies.settle()
            self._copies.fetch(self._pairs)
            torch.cat(self._here, out=self._values)
        return self._values

    def send(self, values: Tensor) -> None:
        """Set the gradients to `values`."""
        if self._same:
            self._values.copy_(values)
            return
        for here, part in zip(self._here, values.split([part.numel() for part in self._here]), strict=True):
            here.copy_(part)
        self._copies.send(self._pairs)


def _read(message: Tensor, coded: CodedVector) -> Tensor:
    """Decode a worker's gradient; NaN if the message is invalid."""
    row = torch.empty(coded.numel)
    try:
        (body,), _ = unpack(message, 1)
        return coded.decode(body, row)
    except PayloadError:
        return row.fill_(float("nan"))
