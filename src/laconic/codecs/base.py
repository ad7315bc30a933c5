"""The interface of codecs, and their registry.

Callers: `exchange` and users (`laconic.codec("topk(0.01)+qsgd(4)")`). A codec is a frozen dataclass without state:
encode is a pure function of (x, step). Residuals, momentum and step counters live in `exchange`.

A payload is a 1-D uint8 tensor: a 16-byte header (see `frame.py`) and the codec's body. Every decoder checks the
header, the length and the checksum before it writes anything.

To add a codec, add one file with one `@register` class to this folder; the conformance suite picks it up.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from laconic import specs
from laconic.errors import BadInput
from laconic.registry import Registry

REGISTRY: Registry[type[Codec]] = Registry("codec", "laconic.codecs")


class Codec(ABC):
    """Turns a 1-D float32 tensor into bytes and back. Every subclass that can be built is a frozen dataclass.

    Class attributes say what a user must know before choosing one; instances may override by property where it
    depends on parameters.

    Attributes:
        name: of the codec in a spec; `register` sets it.
        kind: "quantiser" (default), "selector", "rotation", "lossless" or "matrix"; it decides what `+` may combine.
        fixed_size: every payload for `numel` values has exactly `max_nbytes(numel)` bytes. Default: True.
        unbiased: the mean of decode(encode(x)) over steps is x. Default: False.
        stochastic: the payload depends on the codec's seed and the step. Default: False.
        coarse: so coarse that to encode a sum of decoded values once more costs accuracy, so each rank's payload is
            sent to all (`gather`). Default: False.
        exact: the payload is float32 itself: whoever sends may leave the codec out. Default: False.
        fine: so fine that error feedback is not worth its memory; NaN and infinity are encoded. Default: False.
        source: the paper. Default: "".
        summary: one line for `laconic codecs`. Default: "".

    Raises:
        BadInput: an argument is not one that the codec's docstring allows.
        NonFiniteError: on encoding NaN or infinity, unless the codec is `fine`. Where `encode_feedback` raises it, the
            residual is spoilt: zero it.

    >>> import torch, laconic
    >>> codec = laconic.codec("dynamic8")
    >>> payload = codec.encode(torch.linspace(-1, 1, 1000))
    >>> payload.numel(), codec.decode(payload, 1000).shape
    (1020, torch.Size([1000]))
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = "quantiser"  # "quantiser", "selector", "rotation", "lossless" or "matrix"
    fixed_size: ClassVar[bool] = True  # every payload for numel has exactly max_nbytes(numel) bytes
    unbiased: ClassVar[bool] = False  # E[decode(encode(x))] = x over the random step
    stochastic: ClassVar[bool] = False  # the payload depends on (seed, step)
    coarse: ClassVar[bool] = False  # so coarse that to encode a sum of decoded values once more costs accuracy
    exact: ClassVar[bool] = False  # the payload is float32 itself: whoever sends may leave the codec out
    fine: ClassVar[bool] = False  # so fine that feeding its error back is not worth the memory; carries NaN through
    source: ClassVar[str] = ""  # the paper
    summary: ClassVar[str] = ""  # one line for `laconic codecs`

    @abstractmethod
    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """Encode 1-D float32 `x`; returns a payload, a view of `out` (uint8, ≥ max_nbytes) when given."""

    @abstractmethod
    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        """Decode into a float32 tensor of `numel` values, `out` when given. Raises PayloadError."""

    @abstractmethod
    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        """out += decode(payload), fused. On PayloadError `out` is untouched."""

    def decode_mean(self, payloads: Sequence[Tensor], divisor: int, out: Tensor) -> None:
        """out = (decode(first) + decode(second) + …) / divisor, added from left to right.

        Codecs with a fused kernel override this; the result must be bit-identical to this definition. After a
        PayloadError `out` may be changed.
        """
        first, *others = payloads
        self.decode(first, out.numel(), out=out)
        for payload in others:
            self.decode_add(payload, out)
        if divisor != 1:
            out.div_(divisor)

    @abstractmethod
    def max_nbytes(self, numel: int) -> int:
        """The most bytes a payload for `numel` values can take, header included."""

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """Error feedback in one call: residual += x; payload = encode(residual); residual -= decode(payload).

        Codecs with a fused kernel override this; the result must be bit-identical to this definition.
        """
        if check_input(residual).numel() != check_input(x).numel():
            raise BadInput(f"{self}: the residual has {residual.numel()} values, x has {x.numel()}")
        residual.add_(x)
        payload = self.encode(residual, step=step, out=out)
        residual.sub_(self.decode(payload, residual.numel()))
        return payload

    @functools.cached_property
    def _spec(self) -> str:
        return specs.spec_of(self)

    def __str__(self) -> str:
        return self._spec


register = REGISTRY.register
"""Register a codec class under the name that specs use; a class decorator, `@register("mine")`.

The decorator sets the class's `name`. Importing the file that holds the class is enough: `laconic.codec("mine")`,
`compress`, `distribute` and the command line then know it. A name that is taken raises ValueError.
[Write a codec](../guides/write-a-codec.md) has an example.
"""
names = REGISTRY.names
get = REGISTRY.get


def build(spec: str) -> Codec:
    """The one codec that a spec names; composition with `+` is in `compose.py`."""
    return specs.build(REGISTRY, spec)


def check_input(x: Tensor) -> Tensor:
    """A codec's input: 1-D, float32, contiguous; else BadInput says which."""
    if not isinstance(x, Tensor):
        raise BadInput(f"a codec encodes a contiguous 1-D float32 tensor, got {type(x).__name__}")
    if x.dim() != 1 or x.dtype != torch.float32 or not x.is_contiguous():
        raise BadInput(
            f"a codec encodes a contiguous 1-D float32 tensor, got shape {tuple(x.shape)} of {x.dtype}; "
            "use x.reshape(-1).float()"
        )
    return x
