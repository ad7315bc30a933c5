"""The 16-byte header around every payload, and the checks on the tensors that go in and out of a codec.

Callers: every codec. A payload, little endian:

    offset  0      1        2..3      4..11    12..15    16..
            magic  version  codec id  numel    checksum  body

The codec id is 16 bits derived from the codec's name; the checksum covers the first twelve bytes and the body.
Invariant: `unseal` reads nothing it has not checked, and a body it returns is the body that was sealed: a change
within one aligned 4-byte word (so any flipped bit) is always caught, any other with probability 1 − 2⁻³².
The checksum is not a signature: whoever can write a payload can write a valid one, so parsers of bodies still check
every length and index they read.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import threads
from laconic.codecs.base import check_input
from laconic.errors import BadInput, PayloadError
from laconic.kernels import Array, njit

if TYPE_CHECKING:
    from laconic.codecs.base import Codec

HEADER_NBYTES = 16
HEADER_WORDS = HEADER_NBYTES // 4  # of 32 bits
ALIGN = 16  # bytes, of payloads in a message
_MAGIC = 0x4C
_VERSION = 1
_STRIDE = 0x9E3779B9  # between the positions of neighbouring words: 2³²/φ, odd
_FIELDS = struct.Struct("<BBHQI")  # magic, version, codec id, numel, checksum


def aligned(nbytes: int) -> int:
    """Round up to where the next payload of a message begins."""
    return -(-nbytes // ALIGN) * ALIGN


@functools.cache
def codec_id(name: str) -> int:
    """The 16-bit number that stands for a codec's name on the wire.

    >>> codec_id("dynamic8") == codec_id("dynamic8") != codec_id("linear8")
    True
    """
    return zlib.crc32(name.encode()) & 0xFFFF


def seal(buffer: Tensor, name: str, numel: int, nbytes: int) -> Tensor:
    """Write the header before the body that is already at `buffer[16:nbytes]`; returns `buffer[:nbytes]`.

    Cost: one read of the body.

    >>> payload = seal(torch.zeros(20, dtype=torch.uint8), "none", 1, 20)
    >>> unseal(payload, "none", 1).tolist()
    [0, 0, 0, 0]
    """
    payload = buffer[:nbytes]
    array = payload.numpy()
    words = _words(array)
    words[0] = _MAGIC | _VERSION << 8 | codec_id(name) << 16
    words[1] = numel & 0xFFFFFFFF
    words[2] = numel >> 32
    words[3] = _checksum(array, words)
    return payload


def header_words(name: str, numel: int, nbytes: int) -> tuple[int, int, int, int]:
    """The first three words of a header, and its part of the checksum, all as int32.

    The fourth is what the sum over the body is added to, modulo 2³², for the checksum: mix(wordᵢ ⊕ i·g) of the body's
    whole words, and, where bytes are left over, mix(end ⊕ −g) of these. For devices, which take that sum themselves.
    """
    ends = np.zeros(6, np.uint32)
    ends[0] = _MAGIC | _VERSION << 8 | codec_id(name) << 16
    ends[1:5] = [numel & 0xFFFFFFFF, numel >> 32, (nbytes - HEADER_NBYTES) & 0xFFFFFFFF, (nbytes - HEADER_NBYTES) >> 32]
    start = np.array([_mixed_sum(ends[: 5 if nbytes % 4 else 6], -6)], np.uint32)
    first, low, high, total = np.concatenate([ends[:3], start]).view(np.int32).tolist()
    return first, low, high, total


def unseal(payload: Tensor, name: str, numel: int, *, nbytes: int | None = None) -> Array:
    """Check a payload and return its body, a uint8 view without a copy.

    Args:
        payload: what `encode` returned, as it came from the wire.
        name: the name of the codec that decodes.
        numel: how many values the caller expects.
        nbytes: the exact length of the payload, header included, where the codec knows it.

    Raises:
        PayloadError: the payload is truncated, oversized, corrupt, for another codec or another numel.
    """
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8 or payload.dim() != 1:
        raise PayloadError(f"{name}: a payload is a 1-D uint8 tensor, got {_describe(payload)}")
    if payload.device.type != "cpu":
        raise PayloadError(f"{name}: a payload is decoded on the CPU, got one on {payload.device}; use payload.cpu()")
    if payload.numel() < HEADER_NBYTES:
        raise PayloadError(f"{name}: payload of {payload.numel()} bytes is shorter than a {HEADER_NBYTES}-byte header")
    array = payload.contiguous().numpy()
    magic, version, number, length, expected = _FIELDS.unpack_from(array.data)
    if magic != _MAGIC:
        raise PayloadError(f"{name}: not a Laconic payload: it starts with {magic:#04x}, not {_MAGIC:#04x}")
    if version != _VERSION:
        raise PayloadError(f"{name}: payload of version {version}, this is version {_VERSION}")
    if number != codec_id(name):
        raise PayloadError(f"{name}: payload is another codec's (id {number:#06x}, not {codec_id(name):#06x})")
    if length != numel:
        raise PayloadError(f"{name}: payload holds {length} values, {numel} are expected")
    if nbytes is not None and array.size != nbytes:
        raise PayloadError(f"{name}: payload for {numel} values has {array.size} bytes, not {nbytes}")
    if _checksum(array, _words(array)) != expected:
        raise PayloadError(f"{name}: payload of {array.size} bytes is corrupt: its checksum does not match")
    body: Array = array[HEADER_NBYTES:]
    return body


def buffer_for(codec: Codec, numel: int, out: Tensor | None) -> Tensor:
    """Where `codec` writes a payload for `numel` values: `out` once checked, or a new tensor of `max_nbytes(numel)`."""
    nbytes = codec.max_nbytes(numel)
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.device.type != "cpu":
        raise BadInput(f"{codec}: out must be a contiguous 1-D uint8 tensor on the CPU, got {_describe(out)}")
    if out.numel() < nbytes:
        raise BadInput(f"{codec}: out has {out.numel()} bytes, {numel} values need max_nbytes({numel}) = {nbytes}")
    return out


def floats(x: Tensor, codec: Codec) -> Array:
    """The NumPy view of a codec's float32 tensor, input or sum: 1-D, contiguous, on the CPU, else BadInput."""
    check_input(x)
    if x.device.type != "cpu":
        raise BadInput(f"{codec}: encodes tensors on the CPU, got one on {x.device}; use x.cpu()")
    array: Array = x.detach().numpy() if x.requires_grad else x.numpy()
    return array


def values_for(codec: Codec, numel: int, out: Tensor | None) -> Tensor:
    """Where `codec` decodes `numel` values to: `out` once checked, or a new float32 tensor."""
    if isinstance(numel, bool) or not isinstance(numel, int) or numel < 0:
        raise BadInput(f"{codec}: numel must be a whole number from 0, got {numel!r}")
    if out is None:
        try:
            return torch.empty(numel, dtype=torch.float32)
        except RuntimeError as error:
            raise BadInput(f"{codec}: there is no room for {numel} values") from error
    floats(out, codec)
    if out.numel() != numel:
        raise BadInput(f"{codec}: out has {out.numel()} values, numel is {numel}")
    return out


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} of {value.dtype} on {value.device}"
    return type(value).__name__


def _words(payload: Array) -> Array:
    """The payload as whole 32-bit words, without the bytes left over: four of the header, then the body's."""
    words: Array = payload[: payload.size // 4 * 4].view(np.uint32)
    return words


def _checksum(payload: Array, words: Array) -> int:
    """Σ mix(wordᵢ ⊕ i·g) mod 2³²; words 0, 1, … are the body's, −6 … −1 the header's, the length's and the end's."""
    if words.size < threads.MIN_NUMEL:
        return int(_sum_all(payload, words, words.size))
    body = words[4:]
    parts = threads.run(lambda start, stop: _mixed_sum(body[start:stop], start), body.size)
    return sum(map(int, parts), int(_sum_all(payload, words, 4))) & 0xFFFFFFFF


@njit(nogil=True, cache=True)
def _mixed_sum(words: Array, first: int | np.int64) -> np.uint32:
    """Σ mix(words[i] ⊕ (first + i)·g). As mix is bijective, a change of one word always changes the sum."""
    total = np.uint32(0)
    position = np.uint32(np.uint32(first) * np.uint32(_STRIDE))  # a 32-bit counter keeps the loop in 8 lanes: 30 GB/s
    for i in range(words.size):
        v = np.uint32(words[i] ^ position)
        v = np.uint32(v ^ (v >> np.uint32(16)))
        v = np.uint32(v * np.uint32(0x85EBCA6B))
        v = np.uint32(v ^ (v >> np.uint32(13)))
        v = np.uint32(v * np.uint32(0xC2B2AE35))
        v = np.uint32(v ^ (v >> np.uint32(16)))
        total = np.uint32(total + v)
        position = np.uint32(position + np.uint32(_STRIDE))
    return total


@njit(nogil=True, cache=True)
def _sum_all(payload: Array, words: Array, stop: int) -> np.uint32:
    """The sum of the header's words but for the checksum, of the length, the end, and the body's words up to `stop`."""
    ends = np.zeros(6, np.uint32)
    for i in range(3):  # a slice would compile numpy's message about shapes with it, for two seconds
        ends[i] = words[i]
    length = np.uint64(payload.size - 16)
    ends[3] = np.uint32(length & np.uint64(0xFFFFFFFF))
    ends[4] = np.uint32(length >> np.uint64(32))
    for i in range(4 * words.size, payload.size):
        ends[5] |= np.uint32(payload[i]) << np.uint32(8 * (i - 4 * words.size))
    return np.uint32(_mixed_sum(ends, np.int64(-6)) + _mixed_sum(words[4:stop], np.int64(0)))
