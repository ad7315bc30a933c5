"""The shell of codecs that work on the device: buffers, header, checks, and a payload's way to and from the host.

Callers: kernels (`kernels/`) and torch operations (`plain/`), which fill bodies and read them. They see a payload as
int32 words on the device: four of the header, then the body's, the last one filled up with zeros. So nothing is ever
read or written outside a caller's memory, whatever its length and alignment.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.device import streams
from laconic.codecs.device.base import DeviceCodec
from laconic.codecs.frame import HEADER_NBYTES, HEADER_WORDS, header_words, unseal
from laconic.codecs.kernel import KernelCodec
from laconic.codecs.selector import Sparse
from laconic.errors import NonFiniteError, PayloadError

if TYPE_CHECKING:
    from laconic.codecs.device.kernels.launch import Variant

WritePayload = Callable[[Tensor, Tensor, int, Tensor, Sequence[int]], None]

CORRUPT, NOT_FINITE = 0, 1  # places of a device's findings


@dataclass(frozen=True)
class BodyWay(DeviceCodec):
    """A codec of fixed size whose bodies are made and read on the device.

    Attributes:
        ahead: how its kernels are launched for whole blocks, to be compiled ahead of time.
    """

    codec: KernelCodec | Sparse

    ahead: ClassVar[tuple[Variant, ...]] = ()

    @functools.cached_property
    def findings(self) -> Tensor:
        """How many payloads were corrupt and how many not finite, of those that never came to the processor."""
        return torch.zeros(2, dtype=torch.int32, device=self.device)

    @classmethod
    def why_not(cls, codec: Codec, device: torch.device) -> str:
        """Why this way does not serve a codec with these options, in a clause; empty if it does."""
        return ""

    @abstractmethod
    def write_payload(self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int]) -> None:
        """Fill `words` with the payload of v; or with feedback, when v is not x: v += x; fill; v −= decoded.

        Where v is not finite, a scale of the body is not, either. `header` are the words 0 to 2 and what the body's sum
        is added to for word 3 (see `frame.header_words`).
        """

    def body_sum(self, words: Tensor, nbytes: int) -> Tensor:
        """The checksum's part of a payload's body, as one int32 on the device; by a kernel, or what overrides it."""
        from laconic.codecs.device.kernels import launch

        return launch.body_sum(words, nbytes)

    @abstractmethod
    def read_payload(self, words: Tensor, out: Tensor, add: bool) -> None:
        """out = the values of a payload, or out += them."""

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        values = self.checked(x)
        return self.encoded(values, values, step, out)

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        return self.encoded(self.checked(x), self.checked_residual(x, residual), step, out)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        values = self.values_for(numel, out)
        self.read_payload(self.words_of(payload, numel), values.detach(), False)
        return values

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        self.read_payload(self.words_of(payload, self.checked(out).numel()), out.detach(), True)

    def check(self) -> None:
        block = self.memory.take(2, torch.int32, self.device)
        streams.copy(block, self.findings)
        self.findings.zero_()
        streams.wait(self.findings)
        corrupt, not_finite = block.tolist()
        self.memory.give(block, None)
        if corrupt:
            raise PayloadError(f"{self}: of what was decoded on {self.device}, {corrupt} checks say that it is corrupt")
        if not_finite:
            text = f"{self}: {not_finite} of the tensors encoded on {self.device} hold NaN or infinity"
            raise NonFiniteError(f"{text}; only finite values can be encoded")

    def encoded(self, x: Tensor, v: Tensor, step: int, out: Tensor | None, write: WritePayload | None = None) -> Tensor:
        """The payload that `write`, `write_payload` where there is none, makes, in `out` or where that goes."""
        buffer, nbytes = self.payload_buffer(v.numel(), out), self.max_nbytes(v.numel())
        payload = buffer[:nbytes]
        words = _whole_words(payload) if payload.device == self.device else None
        if words is None:
            words = torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=self.device)
        (write or self.write_payload)(x, v, step, words, header_words(self.codec.wire_name, v.numel(), nbytes))
        if payload.device == self.device:
            self._note_unless_finite(words, v.numel())
            if words.data_ptr() != payload.data_ptr():
                payload.copy_(words.view(torch.uint8)[:nbytes])
            return payload
        self._bring(words.view(torch.uint8)[:nbytes], payload)
        scales = payload[HEADER_NBYTES : HEADER_NBYTES + 4 * self.scales(v.numel())].numpy().view(np.int32)
        if not self.finite(torch.from_numpy(scales), v.numel()):
            self.refuse(v)
        return payload

    def scales(self, numel: int) -> int:
        """How many words at the start of a body show whether the values are finite."""
        return 0

    def finite(self, scales: Tensor, numel: int) -> Tensor:
        """Whether `numel` values with these scales are finite."""
        return scales.view(torch.float32).isfinite().all()

    def refuse(self, v: Tensor) -> NoReturn:
        """Raise the NonFiniteError of the processor's codec."""
        assert isinstance(self.codec, KernelCodec)
        self.codec.refuse(v.cpu().numpy())

    def check_here(self, payload: Tensor, numel: int) -> None:
        """Raise PayloadError if a payload in host memory is not one that an encoder writes."""
        assert isinstance(self.codec, KernelCodec)
        self.codec.check_body(payload[HEADER_NBYTES:].numpy(), numel)

    def words_of(self, payload: Tensor, numel: int) -> Tensor:
        """A payload's words on the device: checked here if it lies in the processor's memory, else on the device."""
        if isinstance(payload, Tensor) and payload.device == self.device and self.device.type != "cpu":
            return self.words_there(payload, numel)
        nbytes = self.max_nbytes(numel)
        unseal(payload, self.codec.wire_name, numel, nbytes=nbytes)
        self.check_here(payload, numel)
        block = self.memory.take(-(-nbytes // 4) * 4, torch.uint8, self.device)
        block[nbytes - nbytes % 4 :] = 0
        block[:nbytes] = payload
        words = torch.empty(block.numel() // 4, dtype=torch.int32, device=self.device)
        streams.copy(words, block.view(torch.int32))
        self.memory.give(block, streams.mark(words))
        return words

    def words_there(self, payload: Tensor, numel: int) -> Tensor:
        """The words of a payload on the device; what is wrong with it is noted."""
        nbytes = self.max_nbytes(numel)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != nbytes:
            text = f"{self}: payload for {numel} values is 1-D uint8 of {nbytes} bytes"
            raise PayloadError(f"{text}, got shape {tuple(payload.shape)} of {payload.dtype}")
        words = _whole_words(payload)
        if words is None:
            words = torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=self.device)
            words.view(torch.uint8)[:nbytes].copy_(payload)
        *fields, start = header_words(self.codec.wire_name, numel, nbytes)
        wrong = words[3] != self.body_sum(words, nbytes) + start
        for place, field in enumerate(fields):
            wrong |= words[place] != field
        scales = words[HEADER_WORDS : HEADER_WORDS + self.scales(numel)]
        self.findings[CORRUPT] += (wrong | ~self.finite(scales, numel)).to(torch.int32)
        return words

    def _note_unless_finite(self, words: Tensor, numel: int) -> None:
        scales = words[HEADER_WORDS : HEADER_WORDS + self.scales(numel)]
        self.findings[NOT_FINITE] += (~self.finite(scales, numel)).to(torch.int32)

    def _bring(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes to the processor's memory, and wait for them."""
        pinned = target.is_pinned()
        block = target if pinned else self.memory.take(source.numel(), torch.uint8, self.device)
        streams.copy(block, source)
        streams.wait(source)
        if not pinned:
            target.copy_(block)
            self.memory.give(block, None)


def _whole_words(payload: Tensor) -> Tensor | None:
    """The payload as int32 words, in place; None where it is not made of whole, aligned ones."""
    if payload.numel() % 4 or payload.data_ptr() % 16 or payload.storage_offset() % 4:
        return None
    return payload.view(torch.int32)
