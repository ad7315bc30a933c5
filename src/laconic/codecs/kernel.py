"""The shell of every codec whose work is a kernel: checks, header, buffers, feedback. A codec's file has its kernels.

Callers: the codecs beside it that give one code to every value (casts, 8 bits, levels, signs, powers of two, shared
exponents). Selectors have a shell of their own, `selector.py`. Kernels run over ranges on `threads.run`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, NoReturn

import numpy as np
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.frame import HEADER_NBYTES, buffer_for, floats, seal, unseal, values_for
from laconic.errors import BadInput, NonFiniteError, PayloadError
from laconic.kernels import Array, njit

_GOOD, _LARGE, _BAD = 0, 1, 2
MOST = 1 << 62  # values that share a scale: the kernels' sums of indices stay below 2⁶³
_ROOM = np.float32(2.0**126)  # no code of any codec is worth as much as four times its scale


class KernelCodec(Codec):
    """A codec whose subclass fills and reads bodies; every payload has `max_nbytes(numel)` bytes."""

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of; of a table that depends on options, with them."""
        return self.name

    @abstractmethod
    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        """Fill `body` with v; or with feedback, when v is not x: v += x; fill body with v; v −= decoded.

        Raises:
            NonFiniteError: by `refuse`, where the codec does not carry NaN and infinity.
        """

    @abstractmethod
    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        """out = the values of `body`, which `check_body` has passed, or out += them.

        Raises:
            PayloadError: no encoder writes such a body; `out` is untouched.
        """

    def check_body(self, body: Array, numel: int) -> None:
        """Check what the checksum cannot: a body that no encoder would write.

        Raises:
            PayloadError: it is one.
        """

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        array = floats(x, self)
        return self._payload(array, array, step, out)

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        array, carried = floats(x, self), floats(residual, self)
        if array.size != carried.size:
            raise BadInput(f"{self}: residual has {carried.size} values, x has {array.size}")
        return self._payload(array, carried, step, out)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        values = values_for(self, numel, out)
        self._restore(payload, floats(values, self), False)
        return values

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        self._restore(payload, floats(out, self), True)

    def refuse(self, v: Array) -> NoReturn:
        """Raise NonFiniteError that names the first value that is not finite."""
        first = int(np.flatnonzero(~np.isfinite(v))[0])
        raise NonFiniteError(f"{self}: value {first} of {v.size} is {v[first]}; only finite values can be encoded")

    def check_scales(self, scales: Array, v: Array) -> None:
        """Refuse v if a scale shows that one of its values is not finite."""
        if _state(scales) == _BAD:
            self.refuse(v)

    def are_large(self, scales: Array) -> bool:
        """Whether a code that no encoder writes could come to infinity under these scales: then `check_decoded`.

        Raises:
            PayloadError: a scale is negative or not finite.
        """
        state = _state(scales)
        if state == _BAD:
            raise PayloadError(f"{self}: payload holds a scale that is negative or not finite")
        return bool(state == _LARGE)

    def check_decoded(self, decode: Callable[[Array], None], numel: int) -> None:
        """Raise PayloadError unless `decode(values)` gives finite values."""
        values = np.empty(numel, np.float32)
        decode(values)
        if not np.isfinite(values).all():
            raise PayloadError(f"{self}: payload holds a value that is not finite")

    def _payload(self, x: Array, v: Array, step: int, out: Tensor | None) -> Tensor:
        buffer = buffer_for(self, v.size, out)
        nbytes = self.max_nbytes(v.size)
        self.encode_body(x, v, step, buffer[HEADER_NBYTES:nbytes].numpy())
        return seal(buffer, self.wire_name, v.size, nbytes)

    def _restore(self, payload: Tensor, out: Array, add: bool) -> None:
        body = unseal(payload, self.wire_name, out.size, nbytes=self.max_nbytes(out.size))
        self.check_body(body, out.size)
        self.decode_body(body, out, add)


class Bucketed(KernelCodec):
    """A body of float32 scales for every `bucket` values, then the codes in 32-bit words, packed as in `planes.py`."""

    bucket: int | None
    scales_per_bucket: ClassVar[int] = 1

    @property
    @abstractmethod
    def places(self) -> int:
        """Codes per word: 32/bits, or 20 for trits."""

    def __post_init__(self) -> None:
        bucket, places = self.bucket, self.places
        if bucket is not None and (not isinstance(bucket, int) or not places <= bucket <= MOST or bucket % places):
            most = ", at most 2⁶²" if isinstance(bucket, int) and bucket > MOST else ""
            raise BadInput(f"{self.name}: bucket must be none or a positive multiple of {places}{most}, got {bucket}")

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + 4 * (self.scale_count(numel) + -(-numel // self.places))

    def parts(self, body: Array, numel: int) -> tuple[Array, Array]:
        """The scales and the words of a body."""
        count = self.scale_count(numel)
        return body[: 4 * count].view(np.float32), body[4 * count :].view(np.uint32)

    def scale_count(self, numel: int) -> int:
        buckets = -(-numel // self.bucket) if self.bucket else min(numel, 1)
        return buckets * self.scales_per_bucket


@njit(nogil=True, cache=True)
def _state(scales: Array) -> int:
    good, small = True, True
    for i in range(scales.size):
        good &= scales[i] >= 0 and scales[i] < np.inf
        small &= scales[i] < _ROOM
    return _BAD if not good else _GOOD if small else _LARGE
