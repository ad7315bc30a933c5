"""Layers that compute a convolution by a plan, and otherwise behave as the original layers.

Callers: `tuning.py`. A tuned layer shares its parameters, buffers and settings with the layer it stands for, so that
state dicts, optimisers and `.to()` see no difference; shapes without a plan run torch's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laconic.operators import method as methods
from laconic.operators.convolve import ConvolutionRoute, Roles, apply
from laconic.operators.method import Method
from laconic.operators.search import MethodChoice
from laconic.operators.shape import Convolution

_SAMPLES = 64


class Prepared:
    """Data that methods derived from a layer's weights, remade whenever the weights change.

    In-place changes raise the tensor's version. Changes through `.data` do not, so some values, spread evenly, are
    compared as well; one value changed through `.data` alone may go unnoticed until `untune` or a version's rise.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Method, Convolution], Any] = {}
        self._stamp: tuple[Any, ...] = ()
        self._view: tuple[int, Any] = (0, None)

    def __call__(self, weight: Tensor, method: Method, conv: Convolution) -> Any:
        stamp = self._stamp_of(weight)
        if stamp != self._stamp:
            self._kept.clear()
            self._stamp = stamp
        key = (method, conv)
        if key not in self._kept:
            self._kept[key] = method.prepare(weight, conv)
        return self._kept[key]

    def _stamp_of(self, weight: Tensor) -> tuple[Any, ...]:
        where = weight.data_ptr()
        if self._view[0] != where:
            flat = weight.detach().view(-1) if weight.is_contiguous() else None
            self._view = (where, None if flat is None else flat[:: max(1, flat.numel() // _SAMPLES)].numpy())
        values = b"" if self._view[1] is None else self._view[1].tobytes()
        return where, None if weight.is_inference() else weight._version, values

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return Prepared()

    def __reduce__(self) -> tuple[Callable[[], Prepared], tuple[()]]:
        return Prepared, ()


class TunedLayer(nn.Module):
    """The additions of tuned layers to the layers they replace."""

    routes: dict[tuple[int, ...], Roles]
    active: bool = True  # else everything is torch's own
    original: tuple[nn.Module]  # in a tuple: torch would take it for a child
    trains: bool

    def tuned_forward(self, x: Tensor, native: Callable[[Tensor], Tensor]) -> Tensor:
        """The convolution by its plan, or torch's own where there is none, and of tensors that are only traced."""
        roles = self.routes.get(tuple(x.shape))
        weight, bias = self.weight, self.bias
        if (
            roles is None
            or not self.active
            or x.dtype != weight.dtype
            or str(x.dtype) != f"torch.{roles.conv.dtype}"
            or x.device.type != "cpu"
            or type(x) not in (Tensor, nn.Parameter)
        ):
            return native(x)
        assert isinstance(weight, Tensor)
        recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if torch.is_autocast_enabled("cpu") or (recorded and not self.trains):
            return native(x)
        return apply(x, weight, bias, roles)  # type: ignore[arg-type]


class TunedConv1d(TunedLayer, nn.Conv1d):
    """An nn.Conv1d by the methods of a plan."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model calls its methods as they are
    def forward(self, x: Tensor) -> Tensor:
        return self.tuned_forward(x, super().forward)


class TunedConv2d(TunedLayer, nn.Conv2d):
    """An nn.Conv2d by the methods of a plan."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model calls its methods as they are
    def forward(self, x: Tensor) -> Tensor:
        return self.tuned_forward(x, super().forward)


TUNED: dict[type[nn.Module], type[TunedLayer]] = {nn.Conv1d: TunedConv1d, nn.Conv2d: TunedConv2d}


def tuned_layer(layer: nn.Module, plans: Iterable[tuple[Convolution, list[MethodChoice]]], trains: bool) -> TunedLayer:
    """A layer that shares everything with `layer` and follows the plans."""
    kind = TUNED[type(layer)]
    found = kind.__new__(kind)
    found.__dict__.update(layer.__dict__)  # the very dictionaries of parameters and buffers
    found.original, found.trains, prepared = (layer,), trains, Prepared()
    found.routes = {conv.input_shape: _roles(conv, choices, prepared) for conv, choices in plans}
    return found


def _roles(conv: Convolution, choices: list[MethodChoice], prepared: Prepared) -> Roles:
    by_role = {choice.role: choice for choice in choices}
    forward = by_role["forward"]
    roles = Roles(conv, ConvolutionRoute(methods.build(forward.method), forward.pieces), prepared=prepared)
    back = by_role.get("input gradient")
    if back is not None and back.gains:
        roles.input_gradient = ConvolutionRoute(methods.build(back.method), back.pieces)
    of_weight = by_role.get("weight gradient")
    if of_weight is not None and of_weight.gains:
        roles.weight_gradient = ConvolutionRoute(methods.build(of_weight.method), of_weight.pieces)
    return roles
