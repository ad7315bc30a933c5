"""What a codec is, how it is named, and the frame around every payload.

Callers: `exchange` and users (`laconic.codec("topk(0.01)+qsgd(4)")`). A codec is a frozen dataclass without state:
encode is a pure function of (x, step). Residuals, momentum and step counters live in `exchange`.

A payload is a 1-D uint8 tensor: a 16-byte header (see `frame.py`) and the codec's body. Every decoder checks the
header, the length and the checksum before it writes anything.

To add a codec, add one file with one `@register` class to this folder; the conformance suite picks it up.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from laconic.errors import BadInput, UnknownName

_REGISTRY: dict[str, type[Codec]] = {}
C = TypeVar("C", bound="type[Codec]")


class Codec(ABC):
    """Turns a 1-D float32 tensor into bytes and back. Every subclass that can be built is a frozen dataclass.

    Class attributes say what a user must know before choosing one; instances may override by property where it
    depends on parameters.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = "quantiser"  # "quantiser", "selector", "lossless" or "matrix"
    fixed_size: ClassVar[bool] = True  # every payload for numel has exactly max_nbytes(numel) bytes
    unbiased: ClassVar[bool] = False  # E[decode(encode(x))] = x over the random step
    stochastic: ClassVar[bool] = False  # the payload depends on (seed, step)
    coarse: ClassVar[bool] = False  # so coarse that to encode a sum of decoded values once more costs accuracy
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

    @abstractmethod
    def max_nbytes(self, numel: int) -> int:
        """The most bytes a payload for `numel` values can take, header included."""

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """Error feedback in one call: residual += x; payload = encode(residual); residual -= decode(payload).

        Codecs with a fused kernel override this; the result must be bit-identical to this definition.
        """
        residual.add_(x)
        payload = self.encode(residual, step=step, out=out)
        residual.sub_(self.decode(payload, residual.numel()))
        return payload

    def __str__(self) -> str:
        return spec_of(self)


def register(name: str) -> Callable[[C], C]:
    """Class decorator: make a Codec known to `codec()` under `name`."""

    def add(cls: C) -> C:
        if name in _REGISTRY:
            raise ValueError(f"codec name '{name}' is taken by {_REGISTRY[name].__qualname__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """The registered codec names, sorted."""
    return sorted(_REGISTRY)


def get(name: str) -> type[Codec]:
    """The codec class registered under `name`."""
    if name not in _REGISTRY:
        raise UnknownName("codec", name, _REGISTRY)
    return _REGISTRY[name]


_PART = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)


def build(part: str) -> Codec:
    """Build one codec from `name` or `name(arg, key=value)`; composition with `+` is in `compose.py`."""
    match = _PART.match(part)
    if not match:
        raise BadInput(f"codec spec '{part}' is not of the form name or name(arg, key=value)")
    cls = get(match[1])
    fields = [f.name for f in _options(cls)]
    values: dict[str, Any] = {}
    for position, item in enumerate(match[2].split(",") if (match[2] or "").strip() else []):
        if not item.strip():
            raise BadInput(f"codec spec '{part}' has an empty argument")
        key, equals, text = item.partition("=")
        if equals:
            key = key.strip()
        else:
            if position >= len(fields):
                raise BadInput(f"codec '{match[1]}' takes at most {len(fields)} arguments: {', '.join(fields)}")
            key, text = fields[position], item
        if key not in fields:
            raise UnknownName(f"option of codec '{match[1]}'", key, fields)
        if key in values:
            raise BadInput(f"codec '{match[1]}': option '{key}' is given twice")
        values[key] = _literal(text.strip())
    try:
        return cls(**values)
    except TypeError as error:
        raise BadInput(f"codec '{part}': {error}; its options: {', '.join(fields) or 'none'}") from error


def _options(codec: Any) -> list[dataclasses.Field[Any]]:
    """The options of a codec class or codec, in the order of its own file."""
    return [f for f in dataclasses.fields(codec) if f.init]


def _literal(text: str) -> int | float | bool | str | None:
    """A number, true/false/none, or a bare word."""
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")


def spec_of(codec: Codec) -> str:
    """The spec string that builds an equal codec: first field bare, the others by name, defaults left out."""
    parts = []
    for position, field in enumerate(_options(codec)):
        value = getattr(codec, field.name)
        if value == field.default and not (isinstance(value, bool) ^ isinstance(field.default, bool)):
            continue
        text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
        parts.append(text if position == 0 else f"{field.name}={text}")
    return f"{codec.name}({', '.join(parts)})" if parts else codec.name


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
