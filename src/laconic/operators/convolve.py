"""A convolution by named methods, with gradients by the best of them: what autograd sees.

Callers: tuned layers, benchmarks, tests, users who want one method by name (`convolve`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.operators.method import Method, WeightGradient, build
from laconic.operators.methods.native import convolution, gradients
from laconic.operators.scratch import fresh
from laconic.operators.shape import Convolution, of_tensors, on_both_sides

_LEAST = [5e-324]  # the least positive double, in a list so that a product of it is not folded


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flush denormal numbers to zero on this thread, as they slow arithmetic a hundredfold; put back what was there."""
    before = _LEAST[0] * 1.0 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@dataclass(frozen=True)
class ConvolutionRoute:
    """A method and how the batch is divided for it: `pieces` sum up to the batch."""

    method: Method
    pieces: tuple[int, ...]

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        """The output, piece by piece, with denormal numbers flushed."""
        with flushed_denormals():
            if len(self.pieces) == 1:
                return self.method.run(x, prepared, bias, conv)
            y, start = fresh(conv.output_shape, x.dtype), 0
            for piece, some in zip(self.pieces, x.split(self.pieces), strict=True):
                y[start : start + piece] = self.method.run(some, prepared, bias, conv.with_batch(piece))
                start += piece
            return y

    def weight_gradient(self, x: Tensor, grad: Tensor, conv: Convolution) -> Tensor:
        """The gradient of the weights, the sum of the pieces' gradients, with denormal numbers flushed."""
        method = self.method
        assert isinstance(method, WeightGradient)
        with flushed_denormals():
            total = None
            for piece, some, of_some in zip(self.pieces, x.split(self.pieces), grad.split(self.pieces), strict=True):
                found = method.weight_gradient(some, of_some, conv.with_batch(piece))
                total = found if total is None else total.add_(found)
            assert total is not None
            return total


@dataclass
class Roles:
    """The methods of one convolution by role: output, gradient of the input, gradient of the weights.

    `input_gradient` runs on the adjoint convolution; None is torch's own, for both gradients.
    """

    conv: Convolution
    forward: ConvolutionRoute
    input_gradient: ConvolutionRoute | None = None
    weight_gradient: ConvolutionRoute | None = None
    prepared: Callable[[Tensor, Method, Convolution], Any] = lambda weight, method, conv: method.prepare(weight, conv)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, roles: Roles) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.roles = roles
        # Not `roles.prepared`: the weights change before they are used again.
        y = roles.forward.run(x, roles.forward.method.prepare(weight, roles.conv), bias, roles.conv)
        return _contained(y, x, weight, bias, roles)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), roles, conv = ctx.saved_tensors, ctx.roles, ctx.roles.conv
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        of_x = of_weight = None
        if for_x and roles.input_gradient is not None:
            of_x = _input_gradient(grad, weight, roles)
        if for_weight and roles.weight_gradient is not None:
            of_weight = roles.weight_gradient.weight_gradient(x, grad, conv)
        left = (for_x and of_x is None, for_weight and of_weight is None)
        if any(left):
            native_x, native_weight = gradients(x, weight, grad, conv, left)
            of_x, of_weight = native_x if left[0] else of_x, native_weight if left[1] else of_weight
        of_bias = grad.sum((0, *range(2, grad.dim()))) if for_bias else None
        return of_x, of_weight, of_bias, None


def _input_gradient(grad: Tensor, weight: Tensor, roles: Roles) -> Tensor:
    adjoint, route = roles.conv.adjoint(), roles.input_gradient
    assert adjoint is not None
    assert route is not None
    return route.run(grad, route.method.prepare(turned(weight, roles.conv), adjoint), None, adjoint)


def turned(weight: Tensor, conv: Convolution) -> Tensor:
    """The weights of the adjoint convolution: half a turn, channels exchanged within each group."""
    grouped = weight.detach().unflatten(0, (conv.groups, -1)).transpose(1, 2)
    return grouped.flatten(0, 1).flip(tuple(range(2, weight.dim()))).contiguous()


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, roles: Roles) -> Tensor:
    """The convolution `roles` describes, known to autograd only if anything needs a gradient."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        y: Tensor = _Convolve.apply(x, weight, bias, roles)
        return y
    with torch.no_grad():
        y = roles.forward.run(x, roles.prepared(weight, roles.forward.method, roles.conv), bias, roles.conv)
        return _contained(y, x, weight, bias, roles)


def _contained(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, roles: Roles) -> Tensor:
    """The output, by torch where NaN or infinity came out of transforms, which spread one of them over whole tiles."""
    if getattr(roles.forward.method, "transforms", False) and not math.isfinite(y.sum()):
        return convolution(x, weight, bias, roles.conv)
    return y


def roles_by(method: Method, conv: Convolution, pieces: Sequence[int] = ()) -> Roles:
    """Everything by one method, as far as it goes; torch's own for what it cannot do."""
    adjoint = conv.adjoint()
    back = ConvolutionRoute(method, (conv.batch,)) if adjoint is not None and not method.refuses(adjoint) else None
    route = ConvolutionRoute(method, tuple(pieces) or (conv.batch,))
    return Roles(conv, route, back, route if isinstance(method, WeightGradient) else None)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, method: str = "native", micro_batch: int = 0,
             **options: Any) -> Tensor:  # fmt: skip
    """Convolve one- or two-dimensional signals by a named method.

    >>> x, w = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
    >>> convolve(x, w, method="winograd(2)").flatten().tolist()
    [9.0, 9.0, 9.0, 9.0]

    Args:
        x: N, C and one or two lengths.
        weight: K, C / groups and the kernel's lengths.
        bias: K values.
        method: a registered one, "native" or "fft(16)".
        micro_batch: samples computed at a time; 0 takes all at once.
        options: stride, padding, dilation (a number, or one an axis) and groups, as in nn.Conv2d; padding may be "same"
            or "valid".

    Raises:
        UnknownName: no such method or option.
        BadInput: shapes that do not fit, or a convolution that the method cannot compute.
    """
    built, axes = build(method), x.dim() - 2
    stride, dilation = (_each(options.pop(name, 1), axes) for name in ("stride", "dilation"))
    asked = options.pop("padding", 0)
    padding = on_both_sides(asked, weight.shape[2:], dilation)
    if padding is None or (asked == "same" and max(stride) > 1):
        text = "no stride, and a kernel that reaches as far on both sides"
        raise BadInput(f'padding="same" needs {text}; pad the input, and give padding=0')
    groups = options.pop("groups", 1)
    if options:
        raise BadInput(f"convolve takes stride, padding, dilation and groups, not {', '.join(options)}")
    conv = of_tensors(x, weight, (stride, padding, dilation, groups))
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        wanted = f"a bias has {conv.out_channels} values of {x.dtype} here"
        raise BadInput(f"{wanted}, not {bias.dtype} of shape {tuple(bias.shape)}")
    why_not = built.refuses(conv)
    if why_not:
        raise BadInput(f"method {method} cannot compute {conv}: {why_not}")
    if conv.batch == 0:  # nothing to compute: no method has to know
        built = build("native")
    return apply(x, weight, bias, roles_by(built, conv, equal_pieces(conv.batch, micro_batch)))


def equal_pieces(batch: int, micro_batch: int) -> tuple[int, ...]:
    """`batch` in pieces of `micro_batch`, the last one shorter; one piece for 0."""
    if micro_batch <= 0 or micro_batch >= batch:
        return (batch,)
    rest = batch % micro_batch
    return (micro_batch,) * (batch // micro_batch) + ((rest,) if rest else ())


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)
