"""Run one rank's stage as micro-batches pass through it.

Caller: `pipeline.py`, with a batch at a time. Receives are posted ahead, as far as the stage before may be ahead. A
send is waited for only once it is known to have arrived: an activation's when its gradient has come back, a gradient's
when an activation that was sent after its receipt has come. The end of a flush waits for the rest. So only consumers
wait for transfers.

Invariants: passes of a kind run in the order of their micro-batches, whatever the schedule, so gradients are summed as
one process sums them. A value's gradient travels back along its chain of users, and each adds its own part to what
comes from behind, again as one process does. Messages between two ranks are sent and received in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from laconic.errors import BadInput
from laconic.parallel.boundary import Boundary, Crossing, Cut, predicted_nbytes
from laconic.parallel.pipeline.cutting import Segment, Value
from laconic.parallel.pipeline.delta import Deltas
from laconic.parallel.pipeline.forms import ConstantForm, Forms, TensorForm
from laconic.parallel.pipeline.timetable import Pass

Loss = Callable[[Any, int], Tensor]  # of the model's output for the index-th micro-batch of its batch


class Span(NamedTuple):
    """One activity of a stage for a micro-batch, "compute" or "wait", from start to end on this machine's clock."""

    kind: str
    way: str
    micro: int
    begin_s: float
    end_s: float


@dataclass(eq=False)
class MicroBatches:
    """A stage's data of a batch under way.

    Attributes:
        forms: of what crosses, for each micro-batch.
        inputs: of the model, for each micro-batch; only the first stage reads them.
        loss: None where nothing is trained.
        weights: the version that its passes use, on stages that keep several; None: the stage's own.
        samples: the numbers of each micro-batch's samples, for `Deltas`.
        first: the number of its first micro-batch.
        outputs: the model's, by micro-batch, where there is no loss.
    """

    segment: Segment
    forms: Sequence[Forms]
    inputs: Sequence[Sequence[Tensor]]
    loss: Loss | None
    weights: Mapping[str, Tensor] | None = None
    samples: Sequence[Tensor] | None = None
    first: int = 0
    total: Tensor | None = None
    outputs: list[Any] = field(default_factory=list)

    def forms_of(self, micro: int) -> Forms:
        """Of what crosses for a micro-batch."""
        return self.forms[micro - self.first]

    def samples_of(self, micro: int) -> Tensor:
        """The samples of a micro-batch."""
        assert self.samples is not None
        return self.samples[micro - self.first]


@dataclass(eq=False)
class _Held:
    """The values that a backward pass needs from its forward pass."""

    batch: MicroBatches
    taken: dict[str, Tensor]
    given: dict[str, Tensor]
    loss: Tensor | None


def sent_nbytes(value: Value, form: TensorForm | ConstantForm, boundary: Boundary, stage: int) -> tuple[int, int]:
    """What a stage sends of a value for a micro-batch, forward and backward."""
    if isinstance(form, ConstantForm):
        return 0, 0
    codecs = boundary if form.dtype.is_floating_point else Boundary.of(None)
    numel, users = math.prod(form.shape), len(value.targets) if value.source == stage else 0
    returns = stage in value.targets and form.needs_grad
    return (
        users * predicted_nbytes(codecs.forward, numel, form.dtype),
        predicted_nbytes(codecs.backward, numel, form.dtype) if returns else 0,
    )


class Runner:
    """The passes of one stage.

    Args:
        values: all that crosses, on all ranks alike.
        cuts: where each value crosses, and its twin that sends exactly.
        lags: of all stages, see `timetable`.
    """

    def __init__(
        self,
        stage: int,
        values: Sequence[Value],
        cuts: Mapping[str, tuple[Cut, Cut]],
        lags: Sequence[int],
        device: torch.device,
        deltas: Deltas | None = None,
    ) -> None:
        self.stage, self.lags, self.exact = stage, lags, False
        self._values, self._cuts, self._device, self._deltas = values, cuts, device, deltas
        self._held: dict[int, _Held] = {}
        self._coming: dict[tuple[str, int, str], Crossing] = {}  # receives, by way, micro-batch and value
        self._going: dict[tuple[str, int], list[Crossing]] = {}  # sends, by way and micro-batch
        self._posted = 0  # micro-batches whose activations are received or awaited
        self.ended = 0  # the first micro-batch whose backward pass has not run
        self.spans: list[Span] = []
        self.peak_in_flight = 0

    def run(self, batch: MicroBatches, order: Sequence[Pass]) -> None:
        """Run passes; forward ones are of `batch`, backward ones of the batches they were forward in."""
        self.spans = []
        for kind, micro in order:
            if kind == "F":
                self._post(batch, micro)
                self._forward(batch, micro)
            else:
                self._backward(micro)

    def run_rest(self, end: int) -> None:
        """Run the backward passes of all micro-batches before `end` that have not been run."""
        for micro in range(self.ended, end):
            self._backward(micro)

    def settle(self) -> None:
        """Wait until everything that was sent has arrived."""
        for key in list(self._going):
            self._arrived(*key)

    def _post(self, batch: MicroBatches, micro: int) -> None:
        """Post receives for as many activations as the stage before may have sent."""
        last = batch.first + len(batch.inputs)
        if batch.loss is not None:
            last = min(last, max(micro + 1, self.ended + self.lags[max(0, self.stage - 1)] + 1))
        for number in range(max(self._posted, batch.first), last):
            for value in self._values:
                form = batch.forms_of(number)[value.name]
                if self.stage in value.targets and isinstance(form, TensorForm):
                    cut = self._cut(value, form)
                    coming = cut.recv("forward", form.shape, form.dtype, value.source, self._device)
                    self._coming["forward", number, value.name] = coming
            self._posted = number + 1

    def _cut(self, value: Value, form: TensorForm) -> Cut:
        coded, exact = self._cuts[value.name]
        return exact if self.exact or not form.dtype.is_floating_point else coded

    def _wait(self, way: str, micro: int, name: str) -> Tensor:
        begun = time.perf_counter()
        came = self._coming.pop((way, micro, name)).wait()
        assert came is not None
        self.spans.append(Span("wait", way, micro, begun, time.perf_counter()))
        return came

    def _arrived(self, way: str, micro: int) -> None:
        for crossing in self._going.pop((way, micro), ()):
            crossing.wait()

    def nbytes(self, forms: Forms) -> int:
        """What this stage sends for a micro-batch, forward and backward."""
        cuts = {name: pair[self.exact] for name, pair in self._cuts.items()}
        sent = [sent_nbytes(value, forms[value.name], cuts[value.name].boundary, self.stage) for value in self._values]
        return sum(map(sum, sent))

    # forward

    def _forward(self, batch: MicroBatches, micro: int) -> None:
        taken = self._take(batch, micro)
        begun = time.perf_counter()
        given, output = self._compute(batch, taken)
        loss = None
        if self.stage == len(self.lags) - 1:
            if batch.loss is None:
                batch.outputs.append(output)
            else:
                loss = batch.loss(output, micro - batch.first)
                total = loss.detach()
                batch.total = total if batch.total is None else batch.total + total
        self._send_values(batch, micro, given)
        if batch.loss is not None:
            self._await_gradients(batch, micro)
            tensors = {name: each for name, each in taken.items() if isinstance(each, Tensor)}
            self._held[micro] = _Held(batch, tensors, given, loss)
            self.peak_in_flight = max(self.peak_in_flight, len(self._held))
        self.spans.append(Span("compute", "forward", micro, begun, time.perf_counter()))
        if self.stage:  # the stages before have run this forward pass, so they have taken this gradient
            self._arrived("backward", micro - self.lags[0] - 1)

    def _take(self, batch: MicroBatches, micro: int) -> dict[str, Any]:
        """Collect the inputs of the stage's module, by name."""
        if self.stage == 0:
            return dict(zip(batch.segment.takes, batch.inputs[micro - batch.first], strict=True))
        taken: dict[str, Any] = {}
        for name in batch.segment.takes:
            form = batch.forms_of(micro)[name]
            if isinstance(form, ConstantForm):
                taken[name] = form.value
                continue
            came = self._wait("forward", micro, name)
            if (deltas := self._deltas_of(batch, micro, form)) is not None:
                came = deltas.add(name, batch.samples_of(micro), came)
            taken[name] = came.requires_grad_(form.needs_grad and batch.loss is not None)
        return taken

    def _compute(self, batch: MicroBatches, taken: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
        """Compute the values for other stages, by name, and on the last stage the model's output."""
        segment = batch.segment
        args = [
            each.clone() if name in segment.changed and isinstance(each, Tensor) and each.requires_grad else each
            for name, each in taken.items()
        ]
        with torch.set_grad_enabled(batch.loss is not None):
            if batch.weights is None:
                out = segment.module(*args)
            else:
                out = functional_call(segment.module, dict(batch.weights), tuple(args))
        count = len(segment.gives)
        return dict(zip(segment.gives, out[:count], strict=True)), out[count] if len(out) > count else None

    def _send_values(self, batch: MicroBatches, micro: int, given: Mapping[str, Tensor]) -> None:
        going = self._going.setdefault(("forward", micro), [])
        for value in self._values:
            form = batch.forms_of(micro)[value.name]
            if value.source != self.stage or isinstance(form, ConstantForm):
                continue
            tensor, cut = given[value.name], self._cut(value, form)
            if tuple(tensor.shape) != form.shape or tensor.dtype != form.dtype:
                raise BadInput(f"'{value.name}' is {tuple(tensor.shape)}, and {form.shape} by the shapes of the inputs")
            deltas = self._deltas_of(batch, micro, form)
            sent = tensor if deltas is None else deltas.change(value.name, batch.samples_of(micro), tensor)
            going += [cut.send("forward", sent, target) for target in value.targets]
            if deltas is not None:
                deltas.add(value.name, batch.samples_of(micro), going[-1].arrives())

    def _await_gradients(self, batch: MicroBatches, micro: int) -> None:
        """Post the receives of gradients, in the order in which the stages behind send them."""
        for value in self._values:
            form = batch.forms_of(micro)[value.name]
            if self.stage in value.chain[:-1] and isinstance(form, TensorForm) and form.needs_grad:
                behind = value.chain[value.chain.index(self.stage) + 1]
                coming = self._cut(value, form).recv("backward", form.shape, form.dtype, behind, self._device)
                self._coming["backward", micro, value.name] = coming

    def _deltas_of(self, batch: MicroBatches, micro: int, form: TensorForm) -> Deltas | None:
        """The memory of a value that is sent as a change, else None."""
        if self._deltas is None or batch.samples is None or self.exact or form.dtype != torch.float32:
            return None
        return self._deltas if form.shape[:1] == (len(batch.samples_of(micro)),) else None

    # backward

    def _backward(self, micro: int) -> None:
        held = self._held.pop(micro)
        roots: list[Tensor] = [] if held.loss is None else [held.loss]
        gradients: list[Tensor | None] = [None] * len(roots)
        for value in self._values:
            if ("backward", micro, value.name) in self._coming:
                gradient = self._wait("backward", micro, value.name)
                root = held.given[value.name] if value.source == self.stage else held.taken[value.name]
                if root.requires_grad:
                    roots.append(root)
                    gradients.append(gradient)
        begun = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, gradients)
        self._send_gradients(micro, held)
        self.ended = micro + 1
        self.spans.append(Span("compute", "backward", micro, begun, time.perf_counter()))
        self._arrived("forward", micro)  # as its gradient has come back

    def _send_gradients(self, micro: int, held: _Held) -> None:
        going = self._going.setdefault(("backward", micro), [])
        for value in self._values:
            form = held.batch.forms_of(micro)[value.name]
            if self.stage in value.targets and isinstance(form, TensorForm) and form.needs_grad:
                leaf = held.taken[value.name]
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                before = value.chain[value.chain.index(self.stage) - 1]
                going.append(self._cut(value, form).send("backward", gradient, before))
