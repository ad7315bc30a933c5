"""A rotation before a quantiser: `hadamard+int4`. One large value is spread over many, so that scales fit all better.

Caller: `compose.parse`. A rotation is Hadamard's matrix H over n values, n = `block`, a power of two: y = H·x/n, and
back x = H·y, the orthonormal H/√n but for a factor that keeps sums within float32. So an error has the same norm before
and after, and what is lost is lost by the quantiser alone. The n values that are rotated together are not neighbours:
they lie n apart in a tile of n², so that a step of the butterfly adds vectors. The last tile has ⌊length/n⌋ columns;
what is then left is rotated by n/4, by n/16 and so on: H of m values is divided by √(m·n), a power of two, so that
errors of all of them count alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from laconic.codecs import threads
from laconic.codecs.base import Codec, register
from laconic.codecs.kernel import KernelCodec
from laconic.errors import BadInput, NonFiniteError
from laconic.kernels import Array, njit

BLOCKS = tuple(2**k for k in range(1, 11))
ALONE = "hadamard comes before a quantiser that has scales, as in 'hadamard+int4'"
_MOST = np.finfo(np.float32).max


@register("hadamard")
@dataclass(frozen=True)
class Hadamard(KernelCodec):
    """Rotates every `block` values by Hadamard's matrix before `inner` quantises them, and back after decoding.

    y = H·x/n, payload = inner(y), x' = H·decode(payload), with H₁ = (1), H₂ₙ = (Hₙ Hₙ; Hₙ −Hₙ). H·H = n·I, so that
    ‖x' − x‖ = √n·‖decode(payload) − y‖: an orthonormal rotation, after which a block's values are about normal. It
    helps where few values are much larger than the others, and does nothing where all are normal. As unbiased as
    `inner`.

    Cost: inner's bits; log₂(block) additions a value each way, and a copy as long as the input.

    Args:
        block: n, a power of two from 2 to 1024.
        inner: the quantiser; written after a plus.

    Raises:
        BadInput: inner is no quantiser with scales.

    >>> import torch
    >>> from laconic.codecs import codec
    >>> x = torch.zeros(4096).index_fill(0, torch.tensor([5]), 1.0)
    >>> spread = codec("hadamard+int4")
    >>> round(float(spread.decode(spread.encode(x), 4096)[5]), 3)
    1.0

    Source: Suresh et al., Distributed Mean Estimation with Limited Communication, ICML 2017; Wang et al., SDP4Bit,
    NeurIPS 2024.
    Differs: signs are not drawn at random, as in SDP4Bit.
    """

    block: int = 64
    inner: Codec | None = None

    kind: ClassVar[str] = "rotation"
    source: ClassVar[str] = "Suresh et al., ICML 2017; SDP4Bit, NeurIPS 2024"
    summary: ClassVar[str] = "Hadamard's rotation before a quantiser, so that large values are spread over a block"
    examples: ClassVar[tuple[str, ...]] = ("hadamard+int4", "hadamard(8)+fp4(e3m0)", "hadamard(256)+int2")

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block not in BLOCKS:
            raise BadInput(f"hadamard: block is a power of two from 2 to {BLOCKS[-1]}, got {self.block!r}")
        if self.inner is None:
            return  # until `compose.parse` has read what follows
        if not isinstance(self.inner, KernelCodec) or self.inner.fine or isinstance(self.inner, Hadamard):
            raise BadInput(f"{ALONE}, not before '{self.inner}'")

    def before(self, quantiser: Codec) -> Hadamard:
        """The rotation, and then `quantiser`."""
        return Hadamard(self.block, quantiser)

    @property
    def quantiser(self) -> KernelCodec:
        """The codec that the rotated values go through."""
        if not isinstance(self.inner, KernelCodec):
            raise BadInput(ALONE)
        return self.inner

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.quantiser.unbiased

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        return self.quantiser.stochastic

    @property
    def coarse(self) -> bool:  # type: ignore[override]
        return self.quantiser.coarse

    @property
    def wire_name(self) -> str:
        return f"{self.name}{self.block}+{self.quantiser.wire_name}"

    def max_nbytes(self, numel: int) -> int:
        return self.quantiser.max_nbytes(numel)

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        if x is not v:
            np.add(v, x, out=v)
        rotated = np.empty(v.size, np.float32)
        self._rotate(v, rotated, back=False, add=np.float32(0))
        try:
            self.quantiser.encode_body(rotated, rotated, step, body)
        except NonFiniteError as error:
            raise NonFiniteError(f"{self}: {error}") from error
        if x is not v:
            self.quantiser.decode_body(body, rotated, False)
            self._rotate(rotated, v, back=True, add=np.float32(-1))

    def check_body(self, body: Array, numel: int) -> None:
        self.quantiser.check_body(body, numel)

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        rotated = np.empty(out.size, np.float32)
        self.quantiser.decode_body(body, rotated, False)
        self._rotate(rotated, out, back=True, add=np.float32(add))

    def _rotate(self, x: Array, out: Array, *, back: bool, add: np.float32) -> None:
        """out = H·x/n, or `back` H·x; where `add` is not 0, out += add·(that)."""
        block = self.block
        threads.run(lambda start, stop: _rotate(x, out, block, back, add, start, stop), x.size, align=block * block)

    def __str__(self) -> str:
        return self._spec if self.inner is None else f"{Hadamard(self.block)}+{self.inner}"


@njit(nogil=True, cache=True)
def _rotate(x: Array, out: Array, block: int, back: bool, add: np.float32, start: int, stop: int) -> None:
    scratch = np.empty(block * block, np.float32)
    for lo in range(start, stop, block * block):
        length = min(block * block, stop - lo)
        rows, at = block, lo
        while length > 0:
            columns = length // rows
            if columns > 0:
                _tile(x, out, rows, columns, _root(rows * block), back, add, at, scratch)
                at += rows * columns
                length -= rows * columns
            rows = max(rows // 4, 1)


@njit(nogil=True, cache=True)
def _root(square: int) -> int:
    """The square root of a power of two, rounded up to one: exact but for the last value where n is no power of 4."""
    root = 1
    while root * root < square:
        root *= 2
    return root


@njit(nogil=True, cache=True)
def _two_steps(y: Array) -> None:
    """Two steps of the butterfly over the four quarters of y, with half of the loads and stores."""
    q = y.size // 4
    first, second, third, fourth = y[:q], y[q : 2 * q], y[2 * q : 3 * q], y[3 * q :]
    for j in range(np.uint64(q)):
        a, b = first[j] + third[j], second[j] + fourth[j]
        c, d = first[j] - third[j], second[j] - fourth[j]
        first[j], second[j], third[j], fourth[j] = a + b, a - b, c + d, c - d


@njit(nogil=True, cache=True)
def _two_steps_to(x: Array, share: Any, y: Array) -> None:
    """The same of share·x, into other memory."""
    q = np.uint64(y.size // 4)
    for j in range(q):
        k, m, n = j + q, j + 2 * q, j + 3 * q
        first, second = np.float32(x[j] * share), np.float32(x[k] * share)
        third, fourth = np.float32(x[m] * share), np.float32(x[n] * share)
        a, b, c, d = first + third, second + fourth, first - third, second - fourth
        y[j], y[k], y[m], y[n] = a + b, a - b, c + d, c - d


@njit(nogil=True, cache=True)
def _tile(
    x: Array, out: Array, rows: int, columns: int, root: int, back: bool, add: np.float32, first: int, y: Array
) -> None:
    """One tile of `rows` × `columns` values, rotated along its columns and divided by `root`, or back."""
    count = rows * columns
    share = np.float32(1 / rows) if back else np.float32(1 / root)
    if rows >= 4:
        _two_steps_to(x[first : first + count], share, y[:count])
        half = count // 8
    else:
        for j in range(np.uint64(count)):
            y[j] = np.float32(x[np.uint64(first) + j] * share)
        half = count // 2
    while half >= 2 * columns:
        if not back and half == 2 * columns:  # the last two
            for lo in range(0, count, 2 * half):
                _two_steps_to(y[lo : lo + 2 * half], np.float32(1), out[first + lo : first + lo + 2 * half])
            return
        for lo in range(0, count, 2 * half):
            _two_steps(y[lo : lo + 2 * half])
        half //= 4
    if half >= columns:
        for lo in range(0, count, 2 * half):
            low, high = y[lo : lo + half], y[lo + half : lo + 2 * half]
            for j in range(half):
                a, b = low[j], high[j]
                low[j] = a + b
                high[j] = a - b
    if not back:
        out[first : first + count] = y[:count]
        return
    for j in range(np.uint64(count)):
        value = np.float32(y[j] * np.float32(root))
        value = value if value < _MOST else _MOST
        value = value if value > -_MOST else -_MOST
        i = np.uint64(first) + j
        out[i] = value if add == 0 else np.float32(out[i] + np.float32(add * value))
