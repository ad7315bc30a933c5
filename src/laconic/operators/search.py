"""The quickest admitted way to compute one convolution and its gradients, by measurement.

Callers: the tuner, `laconic bench operators`. For each role (output, gradient of the input, gradient of the weights)
the methods that take the convolution and fit the workspace race; the quickest whose error is admitted is raced once
more against torch's own, whole or in micro-batches, and is chosen only if it wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.operators import method as methods
from laconic.operators.convolve import Route, turned
from laconic.operators.method import Method, WeightGradient
from laconic.operators.methods.native import convolution, gradients
from laconic.operators.micro_batch import divide, sizes
from laconic.operators.numerics import Judge
from laconic.operators.shape import Convolution
from laconic.operators.timing import Timed, race

MARGIN = 1.03  # a method must win by this, so that noise does not make a layer slower
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
class Choice:
    """What was chosen for one role, and what it gave: seconds of torch's own and of this, measured in turns."""

    role: str
    method: str
    pieces: tuple[int, ...]
    native_s: float
    tuned_s: float
    speedup: float
    error: float
    workspace_nbytes: int

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "pieces": list(self.pieces)}

    @staticmethod
    def from_json(found: dict[str, Any]) -> Choice:
        """The choice as it was written; ValueError and its like if it is none."""
        choice = Choice(**{**found, "pieces": tuple(found["pieces"])})
        methods.build(choice.method)
        numbers = (choice.native_s, choice.tuned_s, choice.speedup, choice.error)
        if choice.role not in ROLES or not all(isinstance(v, float) and v >= 0 for v in numbers):
            raise ValueError("not a choice")
        if not choice.pieces or not all(isinstance(piece, int) and piece > 0 for piece in choice.pieces):
            raise ValueError("not a division")
        return choice


def least_workspace(conv: Convolution) -> float:
    """The least any method but torch's own needs for one sample; infinity where none takes it."""
    one = conv.with_batch(1)
    found = [m.cost(one).workspace_nbytes for spec, m in _candidates(conv, Limits()) if spec != "native"]
    return min(found, default=math.inf)


def choose(conv: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, limits: Limits) -> list[Choice]:
    """The choice for each role: one without training, three with.

    Args:
        conv: what is computed.
        x: one sample of the example.
        weight, bias: the layer's.
        limits: tolerance, workspace, policy.
    """
    rng = torch.Generator().manual_seed(1)
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    batch = torch.randn(conv.input_shape, generator=rng, dtype=x.dtype)
    with torch.no_grad():
        found = [
            _forward("forward", conv, (x, batch, weight, bias), limits, lambda: convolution(batch, weight, bias, conv))
        ]
        if not limits.train:
            return found
        grad = torch.randn(conv.output_shape, generator=rng, dtype=x.dtype)
        adjoint = conv.adjoint()

        def native() -> Any:
            return gradients(batch, weight, grad, conv, (True, False))[0]

        if adjoint is None:
            found.append(_native("input gradient", conv, race({"native": native}, 3)["native"]))
        else:
            operands = (grad[:1], grad, turned(weight, conv), None)
            found.append(_forward("input gradient", adjoint, operands, limits, native))
        found.append(_weight_gradient(conv, batch, weight, grad, limits))
    return found


def _native(role: str, conv: Convolution, timed: Timed, error: float = 0.0) -> Choice:
    return Choice(role, "native", (conv.batch,), timed.seconds, timed.seconds, 1.0, error, 0)


def _candidates(conv: Convolution, limits: Limits) -> Iterator[tuple[str, Method]]:
    for name in methods.names():
        for spec in methods.candidates(name):
            method = methods.build(spec)
            allowed = not limits.only or spec in limits.only or name in limits.only
            if (spec == "native" or allowed) and not method.refuses(conv):
                yield spec, method


def _forward(role: str, conv: Convolution, operands: tuple[Tensor, Tensor, Tensor, Tensor | None], limits: Limits,
             native: Callable[[], Any]) -> Choice:  # fmt: skip
    """The best route of a convolution: undivided first, then in pieces, then against torch's own again."""
    sample, batch, weight, bias = operands
    judge = Judge(conv, sample, weight)
    allowed = judge.allowed(limits.tolerance)
    every = dict(_candidates(conv, limits))
    errors: dict[str, float] = {}

    def admitted(spec: str) -> bool:
        if spec not in errors:
            errors[spec] = judge.error(every[spec])
        return errors[spec] <= allowed

    def contender(spec: str, size: int) -> Callable[[], Any]:
        method, some, of_size = every[spec], batch[:size], conv.with_batch(size)
        if limits.train:
            return lambda: method.run(some, method.prepare(weight, of_size), bias, of_size)
        prepared = method.prepare(weight, of_size)
        return lambda: method.run(some, prepared, bias, of_size)

    def fits(spec: str, size: int) -> bool:
        return every[spec].cost(conv.with_batch(size)).workspace_nbytes <= limits.workspace_nbytes

    seconds: dict[str, dict[int, float]] = {}
    promising = list(every)
    for size in sorted(sizes(limits.policy, conv.batch), reverse=True):
        some = [spec for spec in promising if spec != "native" and fits(spec, size)]
        base = native if size == conv.batch else contender("native", size)
        timed = race({"native": base, **{spec: contender(spec, size) for spec in some}}, 5, limits.budget_s)
        for spec, found in timed.items():
            seconds.setdefault(spec, {})[size] = found.seconds
        late = [spec for spec in promising if spec not in some]  # what did not fit yet may fit in smaller pieces
        ahead = sorted((spec for spec in timed if spec in some and admitted(spec)), key=lambda s: timed[s].seconds)[:3]
        promising = ["native", *ahead, *(spec for spec in late if spec != "native")]
    plans = {spec: divide(conv.batch, times) for spec, times in seconds.items() if spec == "native" or admitted(spec)}
    whole = ((conv.batch,), seconds["native"][conv.batch])
    for spec, (pieces, _) in sorted(plans.items(), key=lambda item: item[1][1])[:2]:
        if (spec, pieces) == ("native", whole[0]):
            break
        final = race(
            {"native": native, spec: _routed(Route(every[spec], pieces), operands, conv, limits)}, 9, limits.budget_s
        )
        if spec in final and final[spec].speedup >= MARGIN:
            cost = every[spec].cost(conv.with_batch(max(pieces)))
            return Choice(role, spec, pieces, final["native"].seconds, final[spec].seconds, final[spec].speedup,
                          errors.get(spec, judge.error(every[spec])), cost.workspace_nbytes)  # fmt: skip
    return _native(role, conv, Timed(whole[1], 1.0, 1), judge.error(every["native"]))


def _routed(
    route: Route, operands: tuple[Tensor, Tensor, Tensor, Tensor | None], conv: Convolution, limits: Limits
) -> Callable[[], Any]:
    _, batch, weight, bias = operands
    if limits.train:
        return lambda: route.run(batch, route.method.prepare(weight, conv), bias, conv)
    prepared = route.method.prepare(weight, conv)
    return lambda: route.run(batch, prepared, bias, conv)


def _weight_gradient(conv: Convolution, x: Tensor, weight: Tensor, grad: Tensor, limits: Limits) -> Choice:
    """The best method for the gradient of the weights, undivided."""

    def native() -> Any:
        return gradients(x, weight, grad, conv, (False, True))[1]

    some = {spec: m for spec, m in _candidates(conv, limits) if spec != "native" and isinstance(m, WeightGradient)
            and m.cost(conv).workspace_nbytes <= limits.workspace_nbytes}  # fmt: skip
    contenders = {spec: (lambda m=m: m.weight_gradient(x, grad, conv)) for spec, m in some.items()}
    timed = race({"native": native, **contenders}, 7, limits.budget_s)
    best = min(timed, key=lambda spec: timed[spec].seconds)
    if best != "native" and timed[best].speedup >= MARGIN:
        one = conv.with_batch(1)
        exact = gradients(x[:1].double(), weight.double(), grad[:1].double(), one, (False, True))[1]
        method = some[best]
        off = float((method.weight_gradient(x[:1], grad[:1], one).double() - exact).abs().max() / exact.abs().max())
        plain = float(
            (gradients(x[:1], weight, grad[:1], one, (False, True))[1].double() - exact).abs().max() / exact.abs().max()
        )
        if off <= (plain if limits.tolerance == "native" else max(float(limits.tolerance), plain)):
            return Choice("weight gradient", best, (conv.batch,), timed["native"].seconds, timed[best].seconds,
                          timed[best].speedup, off, some[best].cost(conv).workspace_nbytes)  # fmt: skip
    return _native("weight gradient", conv, timed["native"])
