"""The interface of convolution methods, and their registry: add one with `@register("name")` on a class.

Callers: the methods' files, the tuner, benchmarks, the conformance suite, which runs over `names()`.

A method is a frozen dataclass without state. What it derives from the weights alone (their transform, their order in
memory) is made by `prepare` and given back to `run`, so that the caller decides how long to keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from laconic import specs
from laconic.operators.shape import Convolution
from laconic.registry import Registry


@dataclass(frozen=True)
class MethodCost:
    """A method's cost and error bound.

    Attributes:
        multiplications: real ones, in the sums over channels; transforms are not counted, as in the literature.
        depth: of the computation's graph, in operations.
        workspace_nbytes: memory beside input, weights and output, including what `prepare` makes.
        error_bound: b of |y − ŷ| ≤ b · ε · terms · max|x| · max|w|, ε the unit roundoff of the dtype.
    """

    multiplications: int
    depth: int
    workspace_nbytes: int
    error_bound: float


class Method(Protocol):
    """How a convolution is computed.

    One that computes with sums of inputs and weights has `transforms = True`: NaN and infinity spread in it.
    """

    name: ClassVar[str]

    def refuses(self, conv: Convolution) -> str:
        """Why this method cannot compute `conv`; empty when it can."""
        ...

    def cost(self, conv: Convolution) -> MethodCost:
        """What it costs here."""
        ...

    def prepare(self, weight: Tensor, conv: Convolution) -> Any:
        """What `run` needs of the weights."""
        ...

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        """The output. `x` is of `conv`'s shape, with any strides, and does not change."""
        ...


@runtime_checkable
class WeightGradient(Protocol):
    """A method that computes the gradient of the weights too."""

    def weight_gradient(self, x: Tensor, grad: Tensor, conv: Convolution) -> Tensor:
        """Σ_n Σ_o grad[n, k, o] · x[n, c, o·stride + j·dilation − padding]."""
        ...


_registry: Registry[type[Method]] = Registry("convolution method")
register = _registry.register
names = _registry.names
get = _registry.get


def build(spec: str) -> Method:
    """The method that a spec names.

    >>> build("winograd(2)")
    Winograd(outputs=2, channels_last=False)

    Raises:
        UnknownName: no such method or option; the valid ones are listed.
        BadInput: the spec cannot be read, or the method refuses its values.
    """
    return specs.build(_registry, spec)


def examples(name: str) -> tuple[str, ...]:
    """The specs under which a method is tested: its class's `examples`, or its name alone."""
    found: tuple[str, ...] = getattr(get(name), "examples", (name,))
    return found


def candidates(name: str) -> tuple[str, ...]:
    """The specs that a tuner tries: its class's `candidates`, or what is tested."""
    found: tuple[str, ...] = getattr(get(name), "candidates", examples(name))
    return found


def log2_ceiling(n: int) -> int:
    """⌈log₂ n⌉ for n ≥ 1: the depth of a sum of n terms."""
    return (n - 1).bit_length()


def sum_depth(conv: Convolution) -> int:
    """⌈log₂ C⌉ + Σ ⌈log₂ kernel⌉: the depth of the direct sum, C of a group."""
    return log2_ceiling(conv.in_channels // conv.groups) + sum(log2_ceiling(k) for k in conv.kernel)


def direct_cost(conv: Convolution, workspace_nbytes: int) -> MethodCost:
    """The cost of a method that sums the products as they stand: n terms are rounded at most n + 1 times."""
    return MethodCost(conv.multiplications, sum_depth(conv), workspace_nbytes, conv.terms + 2.0)
