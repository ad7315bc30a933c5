"""Reads spec strings with `+`: selector + quantiser, hadamard + quantiser, and anything + entropy.

Callers: `laconic.codec`. Invariant: `parse(str(codec)) == codec`.

    topk(0.01)+qsgd(4)            the values of the selected elements go through the quantiser
    hadamard+int4                 the values are rotated before they are quantised
    qsgd(4)+entropy               the payload's body is entropy-coded without loss
    topk(0.01)+qsgd(4)+entropy    both
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from laconic.codecs.base import Codec, build
from laconic.codecs.entropy import Entropy
from laconic.codecs.selector import Selector, Sparse
from laconic.errors import BadInput
from laconic.kernels import Array
from laconic.specs import spec_of

_SIZES = ("fraction", "t", "bits", "matrix_rank")  # options that set how much is sent
_ALLOWED = "allowed are one codec, selector+quantiser, hadamard+quantiser, and each of these +entropy"


@dataclass(frozen=True)
class Selected(Sparse):
    """A selector whose values are sent by a quantiser: `topk(0.01)+qsgd(4)`.

    The body is the selector's, with the quantiser's whole payload (its 16-byte header included) in place of the
    values. Feedback subtracts what the quantiser really sent, and touches the selected elements only. A cast as
    quantiser can overflow: fp16 sends |x| > 65504 as infinity (from 65520 on, which round there), the residual is then
    infinite too, and the next call raises NonFiniteError.

    Args:
        selector: chooses the elements.
        quantiser: encodes the vector of their values, in the order of the indices.

    Raises:
        BadInput: the two do not go together.

    >>> from laconic.codecs.topk import TopK
    >>> from laconic.codecs import codec
    >>> both = Selected(TopK(2), codec("fp16"))
    >>> both.decode(both.encode(torch.tensor([0.5, -3.0, 2.0])), 3).tolist()
    [0.0, -3.0, 2.0]
    """

    selector: Selector
    quantiser: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.selector, Selector):
            raise BadInput(f"'{self.selector}' is no selector, so '{self.quantiser}' cannot follow it; {_ALLOWED}")
        if self.quantiser.kind not in ("quantiser", "lossless") or isinstance(self.quantiser, Entropy):
            raise BadInput(f"'{self.quantiser}' is no quantiser, so it cannot follow '{self.selector}'; {_ALLOWED}")

    @property
    def chooser(self) -> Selector:
        return self.selector

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.selector.name

    @property
    def wire_name(self) -> str:
        return f"{self.selector.name}+{self.quantiser.name}"

    @property
    def fixed_size(self) -> bool:  # type: ignore[override]
        return self.selector.fixed_size and self.quantiser.fixed_size

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.selector.unbiased and self.quantiser.unbiased

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        return self.selector.stochastic or self.quantiser.stochastic

    @property
    def source(self) -> str:  # type: ignore[override]
        return f"{self.selector.source}; {self.quantiser.source}"

    @property
    def summary(self) -> str:  # type: ignore[override]
        return f"{self.selector.summary}; values by {self.quantiser}"

    def values_nbytes(self, count: int) -> int:
        return self.quantiser.max_nbytes(count)

    def pack_values(self, array: Array, chosen: Array, step: int, out: Array) -> int:
        values = torch.from_numpy(self.selector.gather(array, chosen))
        return self.quantiser.encode(values, step=step, out=torch.from_numpy(out)).numel()

    def unpack_values(self, section: Array, count: int) -> Array:
        values: Array = self.quantiser.decode(torch.from_numpy(section), count).numpy()
        if self.quantiser.exact:  # a cast may overflow, what is sent as it is may not
            self.selector.check_finite(values)
        return values

    def __str__(self) -> str:
        return f"{self.selector}+{self.quantiser}"


@runtime_checkable
class Rotation(Protocol):
    """Rotates values before they are quantised: `hadamard`, whose file is imported when it is named."""

    inner: Codec | None

    def before(self, quantiser: Codec) -> Codec: ...


def parse(spec: str) -> Codec:
    """The codec that a spec string names; see `laconic.codec`.

    >>> str(parse("topk(0.02) + fp16 + entropy"))
    'topk(0.02)+fp16+entropy'
    """
    parts = split(spec)
    codecs = [build(part) for part in parts]
    whole = codecs[0]
    for position, codec in enumerate(codecs[1:], start=1):
        if isinstance(whole, Rotation) and whole.inner is None:
            whole = whole.before(codec)
        elif isinstance(whole, Entropy):
            raise BadInput(f"codec '{spec}': entropy comes last; {_ALLOWED}")
        elif codec.name == "entropy":
            if whole.kind == "matrix":
                raise BadInput(f"codec '{spec}': '{whole}' takes matrices and cannot be composed; {_ALLOWED}")
            whole = Entropy(inner=whole)
        elif position == 1 and isinstance(whole, Selector):
            whole = Selected(whole, codec)
        else:
            raise BadInput(f"codec '{spec}': '{codec}' cannot follow '{whole}'; {_ALLOWED}")
    if isinstance(whole, Rotation) and whole.inner is None:
        raise BadInput(f"codec '{spec}' comes before a quantiser that has scales, as in '{whole}+int4'")
    return whole


def spelled_out(spec: str) -> str:
    """The same codec's spec with the options that set how much is sent, also where they are the default.

    >>> spelled_out("topk+qsgd(bucket=64)")
    'topk(0.01)+qsgd(4, bucket=64)'
    """
    return "+".join(part if part == "entropy" else spec_of(build(part), _SIZES) for part in split(spec))


def split(spec: str) -> list[str]:
    """The parts between the `+` that stand outside parentheses and outside numbers such as 1e+3.

    >>> split("threshold(1e+1) + qsgd(4)")
    ['threshold(1e+1) ', ' qsgd(4)']
    """
    parts, depth = [""], 0
    for character in spec:
        depth += (character == "(") - (character == ")")
        if character == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if any(not part.strip() for part in parts):
        raise BadInput(f"codec spec '{spec}' has an empty part; {_ALLOWED}")
    return parts

