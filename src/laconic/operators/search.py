"""The quickest admitted way to compute one convolution and its gradients, by measurement.

Callers: the tuner, benchmarks. For each role (output, gradient of the input, gradient of the weights) the methods that
take the convolution and fit the workspace race; the quickest whose error is admitted is raced once more against torch's
own, whole or in micro-batches, and is chosen only if it wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.operators import method as methods
from laconic.operators.convolve import ConvolutionRoute, turned
from laconic.operators.method import Method, WeightGradient
from laconic.operators.method_error import Judge, relative_error
from laconic.operators.methods.native import convolution, gradients
from laconic.operators.micro_batch import divide, sizes
from laconic.operators.shape import Convolution
from laconic.operators.timing import race

MARGIN = 1.03  # a method must win by this, so that noise does not make a layer slower
_SCREENED = 4  # samples on which methods of larger batches are compared first
ROLES = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Limits:
    """What a choice must respect.

    Attributes:
        tolerance: largest relative error, or "native".
        workspace_nbytes: most memory of a method beside input, weights and output.
        policy: of micro-batching: "undivided", "powers" or "all".
        train: weights change in every step, so that what is prepared from them is charged; gradients are tuned too.
        only: the specs that may be chosen; empty for all.
        budget_s: seconds for one race.
    """

    tolerance: float | str = 1e-5
    workspace_nbytes: int = 64 << 20
    policy: str = "powers"
    train: bool = False
    only: tuple[str, ...] = ()
    budget_s: float = 1.0


@dataclass(frozen=True)
class MethodChoice:
    """What was chosen for one role, and what it gave: seconds of torch's own and of this, measured in turns.

    `undivided_s` is the time of the quickest admitted way that takes the batch whole: what micro-batches gain is its
    ratio to `tuned_s`.
    """

    role: str
    method: str
    pieces: tuple[int, ...]
    native_s: float
    tuned_s: float
    speedup: float
    undivided_s: float
    error: float
    workspace_nbytes: int

    def __post_init__(self) -> None:
        methods.build(self.method)
        figures = (self.native_s, self.tuned_s, self.speedup, self.undivided_s, self.error)
        if self.role not in ROLES or not all(figure >= 0 for figure in figures):
            raise BadInput(f"a choice has one of the roles {', '.join(ROLES)}, and no figure below zero, got {self}")
        if not self.pieces or min(self.pieces) < 1:
            raise BadInput(f"a batch is divided into pieces of 1 sample or more, got {self.pieces}")

    @property
    def gains(self) -> bool:
        """Whether it is not just torch's own on the whole batch."""
        return self.method != "native" or len(self.pieces) > 1

    def native(self) -> MethodChoice:
        """torch's own instead."""
        return replace(self, method="native", pieces=(sum(self.pieces),), tuned_s=self.native_s, speedup=1.0,
                       undivided_s=self.native_s, error=0.0, workspace_nbytes=0)  # fmt: skip

    def in_order(self) -> MethodChoice:
        """The same with a result in torch's order of memory; gradients of weights always are."""
        if self.role == "weight gradient" or not getattr(methods.build(self.method), "channels_last", False):
            return self
        other = self.method.replace(", channels_last=true", "")
        return self.native() if other == self.method else replace(self, method=other)


def least_workspace(conv: Convolution) -> float:
    """The least any method but torch's own needs for one sample; infinity where none takes it."""
    one = conv.with_batch(1)
    found = [m.cost(one).workspace_nbytes for spec, m in _candidates(conv, Limits()) if spec != "native"]
    return min(found, default=math.inf)


def choose(
    conv: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, limits: Limits, needs_input_gradient: bool = True
) -> list[MethodChoice]:
    """The choice for each role: one without training, two or three with.

    Args:
        conv: what is computed.
        x: one sample of the example.
        weight, bias: the layer's.
        limits: tolerance, workspace, policy.
        needs_input_gradient: whether anything before the layer learns.
    """
    rng = torch.Generator().manual_seed(1)
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    batch = torch.randn(conv.input_shape, generator=rng, dtype=x.dtype)
    with torch.no_grad():
        found = [
            _convolution(
                "forward", conv, (x, batch, weight, bias), limits, lambda: convolution(batch, weight, bias, conv)
            )
        ]
        if not limits.train:
            return found
        grad = torch.randn(conv.output_shape, generator=rng, dtype=x.dtype)
        if needs_input_gradient:
            found.append(_input_gradient(conv, batch, weight, grad, limits))
        found.append(_weight_gradient(conv, batch, weight, grad, limits))
    return found


def _candidates(conv: Convolution, limits: Limits) -> Iterator[tuple[str, Method]]:
    for name in methods.names():
        for spec in methods.candidates(name):
            method = methods.build(spec)
            allowed = not limits.only or spec in limits.only or name in limits.only
            if (spec == "native" or allowed) and not method.refuses(conv):
                yield spec, method


@dataclass
class _Contest:
    """The race of all methods for one role: output, gradient of the input or gradient of the weights.

    Attributes:
        role, conv: what is computed.
        every: the methods that can.
        native: torch's own, on the whole batch.
        piece: (spec, samples, charged) -> the computation of so many samples, with or without what is derived from
            weights that change.
        routed: (spec, pieces) -> that of the whole batch in pieces.
        error: of a method.
        allowed: the largest error admitted.
    """

    role: str
    conv: Convolution
    every: dict[str, Method]
    native: Callable[[], Any]
    piece: Callable[[str, int, bool], Callable[[], Any]]
    routed: Callable[[str, tuple[int, ...]], Callable[[], Any]]
    error: Callable[[str], float]
    allowed: float

    def winner(self, limits: Limits) -> MethodChoice:
        """The best route: methods undivided first, then the best of them in pieces, then against torch's own again."""
        errors: dict[str, float] = {}

        def admitted(spec: str) -> bool:
            if spec not in errors:
                errors[spec] = self.error(spec)
            return spec == "native" or errors[spec] <= self.allowed

        whole: tuple[int, ...] = (self.conv.batch,)
        seconds = {spec: found for spec, found in self._seconds(limits, admitted).items() if admitted(spec)}
        plans = {spec: divide(self.conv.batch, found) for spec, found in seconds.items()}
        finalists = [(spec, plans[spec][0]) for spec in sorted(plans, key=lambda spec: plans[spec][1])[:2]]
        # The times of pieces leave out what it costs to put them together: the best undivided one gets its chance.
        finalists.append((min(seconds, key=lambda spec: seconds[spec].get(whole[0], math.inf)), whole))
        ways = {route: self.routed(*route) for route in finalists if route != ("native", whole)}
        final = race({("native", whole): self.native, **ways}, 9 if ways else 3, limits.budget_s)
        native_s = final["native", whole].seconds
        undivided_s = min(found.seconds for (_, pieces), found in final.items() if pieces == whole)
        for (spec, pieces), found in sorted(final.items(), key=lambda item: item[1].seconds):
            if found.speedup >= MARGIN:
                nbytes = self.every[spec].cost(self.conv.with_batch(max(pieces))).workspace_nbytes
                return MethodChoice(self.role, spec, pieces, native_s, found.seconds, found.speedup, undivided_s,
                              errors[spec], nbytes)  # fmt: skip
        return MethodChoice(self.role, "native", whole, native_s, native_s, 1.0, native_s, errors["native"], 0)

    def _seconds(self, limits: Limits, admitted: Callable[[str], bool]) -> dict[str, dict[int, float]]:
        """Seconds by method and number of samples, as far as they fit and promise something."""
        seconds: dict[str, dict[int, float]] = {}
        promising = self._screened(limits)
        for size in sorted(sizes(limits.policy, self.conv.batch), reverse=True):
            some = [spec for spec in promising if spec != "native" and self._fits(spec, size, limits)]
            base = self.native if size == self.conv.batch else self.piece("native", size, limits.train)
            ways = {spec: self.piece(spec, size, limits.train) for spec in some}
            timed = race({"native": base, **ways}, 5, limits.budget_s, least=2)
            for spec, found in timed.items():
                seconds.setdefault(spec, {})[size] = found.seconds
            late = [spec for spec in promising if spec not in some]  # what did not fit yet may fit in smaller pieces
            ahead = sorted((s for s in timed if s in some and admitted(s)), key=lambda s: timed[s].seconds)[:3]
            promising = ["native", *ahead, *(spec for spec in late if spec != "native")]
        return seconds

    def _screened(self, limits: Limits) -> list[str]:
        """The methods without those that are far behind on a few samples, as large batches take long to try."""
        if self.conv.batch <= _SCREENED:
            return list(self.every)
        some = [spec for spec in self.every if spec == "native" or self._fits(spec, _SCREENED, limits)]
        timed = race({spec: self.piece(spec, _SCREENED, False) for spec in sorted(some, key="native".__ne__)}, 1,
                     limits.budget_s, 2.0, 1)  # fmt: skip
        ahead = sorted(timed, key=lambda spec: timed[spec].seconds)[:5]
        return [spec for spec in self.every if spec in ahead or spec not in some or spec == "native"]

    def _fits(self, spec: str, size: int, limits: Limits) -> bool:
        return self.every[spec].cost(self.conv.with_batch(size)).workspace_nbytes <= limits.workspace_nbytes


def _convolution(role: str, conv: Convolution, operands: tuple[Tensor, Tensor, Tensor, Tensor | None], limits: Limits,
                 native: Callable[[], Any]) -> MethodChoice:  # fmt: skip
    """The best route of an output, or of an input's gradient as the output of the adjoint convolution."""
    sample, batch, weight, bias = operands
    judge = Judge(conv, sample, weight)
    every = dict(_candidates(conv, limits))

    def timed(route: ConvolutionRoute, some: Tensor, of_size: Convolution, charged: bool) -> Callable[[], Any]:
        if charged:
            return lambda: route.run(some, route.method.prepare(weight, of_size), bias, of_size)
        prepared = route.method.prepare(weight, of_size)
        return lambda: route.run(some, prepared, bias, of_size)

    def piece(spec: str, size: int, charged: bool) -> Callable[[], Any]:
        return timed(ConvolutionRoute(every[spec], (size,)), batch[:size], conv.with_batch(size), charged)

    def routed(spec: str, pieces: tuple[int, ...]) -> Callable[[], Any]:
        return timed(ConvolutionRoute(every[spec], pieces), batch, conv, limits.train)

    return _Contest(role, conv, every, native, piece, routed, lambda spec: judge.error(every[spec]),
                    judge.allowed(limits.tolerance)).winner(limits)  # fmt: skip


def _input_gradient(conv: Convolution, x: Tensor, weight: Tensor, grad: Tensor, limits: Limits) -> MethodChoice:
    adjoint = conv.adjoint()

    def native() -> Any:
        return gradients(x, weight, grad, conv, (True, False))[0]

    if adjoint is None:
        seconds = race({"native": native}, 3)["native"].seconds
        return MethodChoice("input gradient", "native", (conv.batch,), seconds, seconds, 1.0, seconds, 0.0, 0)
    return _convolution("input gradient", adjoint, (grad[:1], grad, turned(weight, conv), None), limits, native)


def _weight_gradient(conv: Convolution, x: Tensor, weight: Tensor, grad: Tensor, limits: Limits) -> MethodChoice:
    """The best route of the gradient of the weights, which is judged by one sample."""
    one = conv.with_batch(1)
    every: dict[str, Method] = {s: m for s, m in _candidates(conv, limits) if isinstance(m, WeightGradient)}
    exact = gradients(x[:1].double(), weight.double(), grad[:1].double(), one, (False, True))[1]

    def error(spec: str) -> float:
        return relative_error(ConvolutionRoute(every[spec], (1,)).weight_gradient(x[:1], grad[:1], one).double(), exact)

    def piece(spec: str, size: int, charged: bool) -> Callable[[], Any]:
        route, of_size = ConvolutionRoute(every[spec], (size,)), conv.with_batch(size)
        return lambda: route.weight_gradient(x[:size], grad[:size], of_size)

    def routed(spec: str, pieces: tuple[int, ...]) -> Callable[[], Any]:
        return lambda: ConvolutionRoute(every[spec], pieces).weight_gradient(x, grad, conv)

    plain = error("native")
    allowed = plain if limits.tolerance == "native" else max(float(limits.tolerance), plain)
    return _Contest("weight gradient", conv, every, lambda: gradients(x, weight, grad, conv, (False, True))[1], piece,
                    routed, error, allowed).winner(limits)  # fmt: skip
