"""A model's trained weights as one flat float32 vector, whatever their types and wherever they lie.

Callers: `averaging.py` for all modes whose workers own their weights, and `elastic/replica.py`. A mode reads and writes
`values` inside `with weights.current() as values:` and knows nothing of devices or half types.

A float32 parameter in the processor's memory is a view of `values`: nothing is copied, and what is written there is in
the model at once. Any other parameter p has a float32 master m, its part of `values`:

- `current` begins by m ← p + (m − round(m)): what training did to p since it was last written, and what rounding m to
  p's type had left out then. So nothing is lost between agreements, though p itself is never more exact than its type.
- It ends by p ← round(m).

With float32 p on a device round(m) = m, and both are copies. Masters lie in pinned host memory; parameters of devices
cross through it by `exchange/host_copies.py`. Or they lie on the device of all the weights (`masters="device"`), and
nothing crosses: float32 parameters are views of them there. Checkpoints hold the masters of half types: with p they are
all there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codecs.device.streams import pin
from laconic.errors import BadInput, DeviceMemoryError
from laconic.exchange.host_copies import HostCopies, twins_of
from laconic.storage.form import check_like

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_CPU = torch.device("cpu")


class FlatWeights:
    """The trained parameters as the flat float32 vector `values`; see above for when it holds what they hold.

    Args:
        masters: where `values` lies, one of `base.MASTERS`.
        stay: parameters stay in their own memory, which others share, and cross as copies.

    Raises:
        BadInput: a parameter is of another type than TYPES, or has no values; weights of several devices have no one
            device for their masters.
        DeviceMemoryError: there is no memory for the masters.
    """

    def __init__(self, parameters: list[nn.Parameter], masters: str = "host", *, stay: bool = False) -> None:
        check_types(parameters)
        self.parameters, self._stay = parameters, stay
        self.copies = HostCopies()
        away = next((p.device for p in parameters if not p.is_cpu), _CPU)
        numel = sum(p.numel() for p in parameters)
        if masters == "device":
            values = _on_one_device(numel, parameters)
        else:
            values = torch.empty(numel) if away == _CPU else pin(numel, torch.float32, away, "weights", "free some")
        for parameter, part in self.parts(values):
            part.copy_(parameter.detach())
        self.lay(values)

    def lay(self, values: Tensor) -> None:
        """Use `values` as the storage of the weights: float32 parameters that lie where it does become views of it."""
        self.values = values
        for parameter, part in self.parts():
            if parameter.dtype == torch.float32 and parameter.device == values.device and not self._stay:
                parameter.data = part
        self._places = [parameter.data_ptr() for parameter in self.parameters]
        half = [p.detach() for p in self.parameters if p.device != values.device and p.dtype != torch.float32]
        twins = iter(twins_of(half))
        self._crossing: list[tuple[nn.Parameter, Tensor]] = []  # each with its twin in host memory
        self._rounded: list[tuple[Tensor, Tensor]] = []  # masters, each with what holds it rounded: parameter or twin
        for parameter, part in self.parts():
            is_master = parameter.dtype == torch.float32 and not self._stay
            rounded = part if is_master else parameter.detach()
            if parameter.device != values.device:
                rounded = part if parameter.dtype == torch.float32 else next(twins)
                self._crossing.append((parameter, rounded))
            if rounded is not part:
                self._rounded.append((part, rounded))

    def parts(self, flat: Tensor | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and the view of `flat`, or else of `values`, that is its own."""
        pieces = torch.split(self.values if flat is None else flat, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            yield parameter, piece.view(parameter.shape)

    def check_in_place(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse parameters that were moved or added: averaging would miss them."""
        if any(parameter.data_ptr() != place for parameter, place in zip(self.parameters, self._places, strict=True)):
            text = "the model's parameters were replaced after distribute() (model.to, .half, …); do that before"
            raise BadInput(text)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count != len(self.parameters):
            text = f"{count - len(self.parameters)} parameters were added to the optimiser after distribute()"
            raise BadInput(f"{text}; add them before, or the workers would drift apart")

    # weights

    @contextmanager
    def current(self) -> Iterator[Tensor]:
        """Yield `values` in step with the model, to read and write; at the end, write them to the model."""
        self.copies.settle()
        self.copies.fetch((parameter.detach(), twin) for parameter, twin in self._crossing)
        for master, rounded in self._rounded:
            master.sub_(master.to(rounded.dtype)).add_(rounded)
        try:
            yield self.values
        finally:
            self.write()

    def write(self) -> None:
        """Overwrite the model's weights with `values`."""
        self.copies.settle()
        for master, rounded in self._rounded:
            rounded.copy_(master)
        self.copies.send((parameter.detach(), twin) for parameter, twin in self._crossing)

    # gradients

    @cached_property
    def _gradient_twins(self) -> dict[int, Tensor]:
        crossing = [parameter for parameter, _ in self._crossing]
        return {id(p): twin for p, twin in zip(crossing, twins_of([p.detach() for p in crossing]), strict=True)}

    def set_gradients(self, flat: Tensor) -> None:
        """Set the gradients from `flat`; float32 gradients in host memory become views of it."""
        self.copies.settle()
        sent = []
        for parameter, piece in self.parts(flat):
            if parameter.device == piece.device:
                parameter.grad = piece.to(parameter.dtype)
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            twin = self._gradient_twins[id(parameter)]
            twin.copy_(piece)
            sent.append((parameter.grad, twin))
        self.copies.send(sent)

    def gradients(self, out: Tensor | None = None) -> Tensor:
        """All gradients as one flat vector, zeros where there is none; written to `out` when given."""
        self.copies.settle()
        flat = torch.empty_like(self.values) if out is None else out
        coming = []
        for parameter, piece in self.parts(flat):
            if parameter.grad is None:
                piece.zero_()
            elif parameter.grad.is_sparse:
                raise BadInput("this mode sends dense gradients; use sparse=False, or consistency='hogwild'")
            elif parameter.grad.device == piece.device:
                piece.copy_(parameter.grad)
            else:
                coming.append((parameter.grad.detach(), self._gradient_twins[id(parameter)], piece))
        self.copies.fetch((gradient, twin) for gradient, twin, _ in coming)
        for _, twin, piece in coming:
            piece.copy_(twin)
        return flat

    # state

    @property
    def keeps_masters(self) -> bool:
        """Whether `values` are more precise than the model, so that a checkpoint needs them."""
        return bool(self._rounded)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.clone()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse, with BadInput, the masters of another model."""
        check_like(state, {"values": self.values}, "the state of the float32 masters")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse; the parameters themselves come from the model's state, before or after."""
        self.copies.settle()
        self.values.copy_(state["values"])


def check_types(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters that a float32 vector cannot represent."""
    for parameter in parameters:
        if parameter.dtype not in TYPES or parameter.is_meta:
            text = f"a parameter is {parameter.dtype} on {parameter.device}"
            raise BadInput(f"this mode takes weights of float32, bfloat16 and float16; {text}")


def _on_one_device(numel: int, parameters: list[nn.Parameter]) -> Tensor:
    """Memory for the masters beside the weights."""
    devices = list(dict.fromkeys(parameter.device for parameter in parameters)) or [_CPU]
    if len(devices) > 1:
        where = ", ".join(map(str, devices))
        raise BadInput(f"masters='device' is for weights on one device, and these lie on {where}; use masters='host'")
    try:
        return torch.empty(numel, device=devices[0])
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{devices[0]} has no memory for float32 masters: {error}; use masters='host'"
        ) from error


def is_plain(parameter: Tensor) -> bool:
    """Whether a parameter can be a view of a float32 vector in the processor's memory."""
    return parameter.dtype == torch.float32 and parameter.is_cpu
