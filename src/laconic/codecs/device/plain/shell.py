"""What the plain ways share: feedback, the checksum, and 32-bit arithmetic in int64. Callers: the files beside it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.device.plain import PLAIN
from laconic.codecs.device.shell import BodyWay
from laconic.codecs.frame import HEADER_NBYTES, HEADER_WORDS

MASK = 0xFFFFFFFF


class Bodies(ABC):
    """How torch operations make and read the bodies of one codec's payloads, on one device."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self.codec, self.device = codec, device

    @classmethod
    def why_not(cls, codec: Codec, device: torch.device) -> str:
        """Why these operations do not serve a codec with these options, in a clause; empty if they do."""
        return ""

    @abstractmethod
    def fill(self, v: Tensor, step: int, body: Tensor) -> None:
        """Fill a body, bytes, with v; where v is not finite, so that `finite` says so."""

    @abstractmethod
    def values(self, body: Tensor, numel: int) -> Tensor:
        """The values of a body."""

    @abstractmethod
    def scales(self, numel: int) -> int:
        """How many words at the start of a body show whether the values are finite."""

    @abstractmethod
    def finite(self, scales: Tensor, numel: int) -> Tensor:
        """Whether `numel` values with these scales are finite."""


@dataclass(frozen=True)
class PlainWay(BodyWay):
    """A codec whose bodies are made and read by torch operations; none of them waits for the device."""

    @functools.cached_property
    def bodies(self) -> Bodies:
        return PLAIN.get(self.codec.name)(self.codec, self.device)

    def scales(self, numel: int) -> int:
        return self.bodies.scales(numel)

    def finite(self, scales: Tensor, numel: int) -> Tensor:
        return self.bodies.finite(scales, numel)

    def write_payload(self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int]) -> None:
        nbytes = self.max_nbytes(v.numel())
        if x is not v:
            v.add_(x)
        words[-1:].zero_()
        for place, word in enumerate(header):
            words[place : place + 1].fill_(word)
        body = words.view(torch.uint8)[HEADER_NBYTES:nbytes]
        self.bodies.fill(v, step, body)
        words[3:4] += self.body_sum(words, nbytes)
        if x is not v:
            v.sub_(self.bodies.values(body, v.numel()))

    def read_payload(self, words: Tensor, out: Tensor, add: bool) -> None:
        nbytes = self.max_nbytes(out.numel())
        values = self.bodies.values(words.view(torch.uint8)[HEADER_NBYTES:nbytes], out.numel())
        if add:
            out.add_(values)
        else:
            out.copy_(values)

    def body_sum(self, words: Tensor, nbytes: int) -> Tensor:
        """Σ mix(wordᵢ ⊕ i·g) mod 2³²; bytes that are left over stand at −1."""
        body = words[HEADER_WORDS:]
        position = torch.arange(body.numel(), device=words.device)
        position[nbytes // 4 - HEADER_WORDS :] = -1
        v = (body.to(torch.int64) & MASK) ^ (position * 0x9E3779B9 & MASK)
        v = (v ^ (v >> 16)) * 0x85EBCA6B & MASK
        v = (v ^ (v >> 13)) * 0xC2B2AE35 & MASK
        total = (v ^ (v >> 16)).sum() & MASK
        return ((total ^ 0x80000000) - 0x80000000).to(torch.int32)


def rows_of(v: Tensor, each: int) -> Tensor:
    """v in rows of `each` values, the last filled up with zeros."""
    return torch.nn.functional.pad(v, (0, -v.numel() % each)).view(-1, each)


def magnitude_bits(v: Tensor) -> Tensor:
    return v.view(torch.int32) & 0x7FFFFFFF


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, for exponents from −149 to 127."""
    normal = (exponent + 127).clamp(min=1) << 23
    denormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)
    return torch.where(exponent < -126, denormal, normal).to(torch.int32).view(torch.float32)


def bits32(key: np.uint64, numel: int, device: torch.device) -> Tensor:
    """32 uniform bits for each of `numel` elements, as `codecs/random.py` draws them, in int64."""
    low_key, high_key = int(key) & MASK, int(key) >> 32
    at = torch.arange(numel, device=device)
    v = ((at & MASK) * 0x9E3779B9 + low_key) & MASK
    v = (v ^ (v >> 16)) * 0x85EBCA6B & MASK
    v = ((v ^ (v >> 13)) + high_key + (at >> 32) * 0x7FEB352D) & MASK
    v = v * 0xC2B2AE35 & MASK
    v = (v ^ (v >> 16)) * 0x846CA68B & MASK
    return v ^ (v >> 15)
