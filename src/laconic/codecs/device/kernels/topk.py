"""The k largest magnitudes: `topk`, of the whole tensor or of every bucket, with its values as they are or quantised.

Of a whole tensor, the k-th largest key (the bits of |v|) is found digit by digit. One pass adds, and counts octaves; a
second collects the values from the k-th key's octave up, block by block, in order of index. The three digits below are
counted among these few only, and so is what is chosen: all above the k-th key, and of its ties the first. Nothing comes
to the processor meanwhile. A bucket is one program, which finds its key bit by bit.

Whatever holds NaN or infinity, which have the largest keys of all, says −1 in place of its count.

Cost: 8 bytes a value of memory for a while, of which only what is collected is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.compose import Selected
from laconic.codecs.device.kernels import KERNELS, indices, register
from laconic.codecs.device.kernels.indices import put
from laconic.codecs.device.kernels.launch import FLOAT, WORD, Variant, begin, launch, runs
from laconic.codecs.device.kernels.memory import read, write
from laconic.codecs.device.shell import CORRUPT, BodyWay
from laconic.codecs.frame import HEADER_WORDS, header_words
from laconic.codecs.kernel import KernelCodec
from laconic.codecs.selector import Sparse, raise_non_finite
from laconic.codecs.topk import TopK, share
from laconic.errors import PayloadError

COUNTED = 8192  # values that one program of `count_octaves` reads
BLOCK = 4096  # values of which one program collects
LEAST_BUCKET, MOST_BUCKET = 64, 4096
INFINITY = 0x7F800000
DIGITS = ((23, 31, 255), (15, 23, 255), (7, 15, 255), (0, 7, 127))  # where each begins and ends, and its mask
LAUNCHES = {
    "topk count, with feedback": 1, "topk find a digit": 4, "topk collect": 1, "topk count a digit": 3,
    "topk count the chosen": 1, "topk put": 1,
}  # fmt: skip  # of an encode of a whole tensor with feedback
COLLECTED = 1 / 22  # of a normal distribution for k = 1 %: what lies beyond 2σ, the octave's edge; for the model


@triton.jit
def add_digits(counts_ptr, digit, here):
    """Add to each of 256 counters how many have its digit."""
    place = tl.arange(0, 256)
    found = tl.histogram(tl.where(here, digit, 255), 256)
    found -= tl.where(place == 255, tl.sum((here == 0).to(tl.int32), 0), 0)
    tl.atomic_add(counts_ptr + place, found, mask=found != 0, sem="relaxed")


@triton.jit
def count_octaves(
    x_ptr, v_ptr, counts_ptr, numel, first, FEEDBACK: tl.constexpr, RAGGED: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """v += x (feedback); count the exponents of v."""
    start = (first + tl.program_id(0)).to(tl.int64) * VALUES
    at = tl.arange(0, VALUES)
    here = at < numel - start
    v = read(v_ptr + start + at, here, RAGGED)
    if FEEDBACK:
        v += read(x_ptr + start + at, here, RAGGED)
        write(v_ptr + start + at, v, here, RAGGED)
    add_digits(counts_ptr, (v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23, here)


@triton.jit
def find_digit(counts_ptr, bound_ptr, SHIFT: tl.constexpr):
    """The next digit of the bound, and how many keys with the bound's digits so far are still to be chosen."""
    place = tl.arange(0, 256)
    counts = tl.load(counts_ptr + place)
    wanted = tl.load(bound_ptr + 1)
    reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
    tl.store(bound_ptr, tl.load(bound_ptr) | (digit << SHIFT))
    tl.store(bound_ptr + 1, wanted - tl.sum(tl.where(place > digit, counts, 0), 0))


@triton.jit
def collect(
    v_ptr, bound_ptr, places_ptr, bits_ptr, counts_ptr, numel, first, RAGGED: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """A block's values with keys from the bound up: their places in it and their bits, in order, and how many."""
    block = first + tl.program_id(0)
    start = block.to(tl.int64) * VALUES
    at = tl.arange(0, VALUES)
    here = at < numel - start
    bits = read(v_ptr + start + at, here, RAGGED).to(tl.int32, bitcast=True)
    found = (bits & 0x7FFFFFFF) >= tl.load(bound_ptr)
    if RAGGED:
        found = found & here
    slot = start + tl.cumsum(found.to(tl.int32), 0) - 1
    tl.store(places_ptr + slot, at, mask=found)
    tl.store(bits_ptr + slot, bits, mask=found)
    tl.store(counts_ptr + block, tl.sum(found.to(tl.int32), 0))


@triton.jit
def count_digits(
    bits_ptr, collected_ptr, bound_ptr, counts_ptr,
    SHIFT: tl.constexpr, END: tl.constexpr, MASK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Count a digit of the collected keys that have the bound's digits above it."""
    block = tl.program_id(0)
    at = tl.arange(0, VALUES)
    here = at < tl.load(collected_ptr + block)
    key = tl.load(bits_ptr + block.to(tl.int64) * VALUES + at, mask=here, other=0) & 0x7FFFFFFF
    here = here & ((key >> END) == (tl.load(bound_ptr) >> END))
    add_digits(counts_ptr, (key >> SHIFT) & MASK, here)


@triton.jit
def count_chosen(bits_ptr, collected_ptr, bound_ptr, above_ptr, ties_ptr, VALUES: tl.constexpr):
    """How many of a block's keys are above the bound, and how many are the bound."""
    block = tl.program_id(0)
    at = tl.arange(0, VALUES)
    here = at < tl.load(collected_ptr + block)
    key = tl.load(bits_ptr + block.to(tl.int64) * VALUES + at, mask=here, other=-1) & 0x7FFFFFFF
    bound = tl.load(bound_ptr)
    tl.store(above_ptr + block, tl.sum((here & (key > bound)).to(tl.int32), 0))
    tl.store(ties_ptr + block, tl.sum((here & (key == bound)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["values_at", "width", "low_nbits"])
def put_chosen(
    places_ptr, bits_ptr, collected_ptr, bound_ptr, ties_before_ptr, before_ptr, v_ptr, words_ptr, values_ptr,
    indices_ptr, values_at, width, low_nbits,
    CLEAR: tl.constexpr, BITMAP: tl.constexpr, LIST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Put a block's values above the bound and its ties that are among the first; v = 0 there (CLEAR)."""
    block = tl.program_id(0)
    start = block.to(tl.int64) * VALUES
    at = tl.arange(0, VALUES)
    here = at < tl.load(collected_ptr + block)
    bits = tl.load(bits_ptr + start + at, mask=here, other=-1)
    key, bound = bits & 0x7FFFFFFF, tl.load(bound_ptr)
    tie = here & (key == bound)
    tie_rank = tl.load(ties_before_ptr + block) + tl.cumsum(tie.to(tl.int32), 0)
    chosen = (here & (key > bound)) | (tie & (tie_rank <= tl.load(bound_ptr + 1)))
    rank = tl.load(before_ptr + block) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    index = start + tl.load(places_ptr + start + at, mask=chosen, other=0)
    put(words_ptr, values_ptr, indices_ptr, index, rank, bits, chosen, values_at, width, low_nbits, BITMAP, LIST)
    if CLEAR:
        tl.store(v_ptr + index, tl.zeros((VALUES,), tl.float32), mask=chosen)


@triton.jit(do_not_specialize=["wanted", "each", "values_at", "width", "low_nbits"])
def put_bucket(
    x_ptr, v_ptr, words_ptr, values_ptr, indices_ptr, top_ptr, numel, first, wanted, each, values_at, width, low_nbits,
    FEEDBACK: tl.constexpr, CLEAR: tl.constexpr, BITMAP: tl.constexpr, LIST: tl.constexpr, RAGGED: tl.constexpr,
    BUCKET: tl.constexpr,
):  # fmt: skip
    """v += x (feedback); put the `wanted` largest of a bucket, before which `each` of every other lie; v = 0 there."""
    bucket = first + tl.program_id(0)
    start = bucket.to(tl.int64) * BUCKET
    at = tl.arange(0, BUCKET)
    here = at < numel - start
    v = read(v_ptr + start + at, here, RAGGED)
    if FEEDBACK:
        v += read(x_ptr + start + at, here, RAGGED)
    bits = v.to(tl.int32, bitcast=True)
    key = bits & 0x7FFFFFFF
    if RAGGED:
        key = tl.where(here, key, -1)
    bound = tl.min(tl.zeros((BUCKET,), tl.int32), 0)
    for step in tl.static_range(31):
        probe = bound | (1 << (30 - step))
        bound = tl.where(tl.sum((key >= probe).to(tl.int32), 0) >= wanted, probe, bound)
    tie = key == bound
    spare = wanted - tl.sum((key > bound).to(tl.int32), 0)
    chosen = (key > bound) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= spare))
    rank = bucket * each + tl.cumsum(chosen.to(tl.int32), 0) - 1
    put(words_ptr, values_ptr, indices_ptr, start + at, rank, bits, chosen, values_at, width, low_nbits, BITMAP, LIST)
    tl.atomic_max(top_ptr, tl.max(key, 0))
    if FEEDBACK:
        if CLEAR:
            v = tl.where(chosen, 0.0, v)
        write(v_ptr + start + at, v, here, RAGGED)


def _bucket_warps(bucket: int) -> int:
    """Four or eight values a thread, enough for loads of 128 bits: their ranks and bits take many registers."""
    return max(1, min(8, bucket // 256))


def _ahead() -> tuple[Variant, ...]:
    """The launches of an encode with feedback, of a whole tensor and of buckets, and those of a decode."""
    counting = {"FEEDBACK": True, "RAGGED": False, "VALUES": COUNTED}
    digits = {"SHIFT": 15, "END": 23, "MASK": 255, "VALUES": BLOCK}
    putting = {"CLEAR": True, "BITMAP": False, "LIST": False}
    whole, ints = {"RAGGED": False, "VALUES": BLOCK}, ["i32"] * 7
    return (
        Variant("topk count, with feedback", count_octaves, (FLOAT, FLOAT, WORD, "i32", "i32"), counting, COUNTED, 8),
        Variant("topk collect", collect, (FLOAT, WORD, WORD, WORD, WORD, "i32", "i32"), whole, BLOCK, 8, COLLECTED),
        Variant("topk count a digit", count_digits, (WORD,) * 4, digits, BLOCK, 4, COLLECTED),
        Variant("topk count the chosen", count_chosen, (WORD,) * 5, {"VALUES": BLOCK}, BLOCK, 4, COLLECTED),
        Variant("topk put", put_chosen, (WORD,) * 6 + (FLOAT, WORD, WORD, "*i64", *ints[:3]),
                {**putting, "VALUES": BLOCK}, BLOCK, 8, COLLECTED),
        Variant("topk of buckets encode_feedback", put_bucket, (FLOAT, FLOAT, WORD, WORD, "*i64", WORD, *ints),
                {**putting, "FEEDBACK": True, "RAGGED": False, "BUCKET": 512}, 512, _bucket_warps(512), 1 / 32),
        Variant("topk find a digit", find_digit, (WORD, WORD), {"SHIFT": 15}, 1 << 20, 4),
        *indices.AHEAD,
    )  # fmt: skip


@register("topk")
@dataclass(frozen=True)
class TopKKernels(BodyWay):
    """`topk`, and `topk+…` with a quantiser that has kernels."""

    codec: Sparse

    ahead: ClassVar[tuple[Variant, ...]] = _ahead()

    @classmethod
    def why_not(cls, codec: Codec, device: torch.device) -> str:
        assert isinstance(codec, Sparse)
        assert isinstance(codec.chooser, TopK)
        bucket = codec.chooser.bucket
        if bucket is not None and (bucket & (bucket - 1) or not LEAST_BUCKET <= bucket <= MOST_BUCKET):
            return f"its kernels take buckets of a power of two from {LEAST_BUCKET} to {MOST_BUCKET}, or none"
        if isinstance(codec, Selected):
            name = codec.quantiser.name
            has = name in KERNELS.names()
            return KERNELS.get(name).why_not(codec.quantiser, device) if has else f"{name} has no kernel"
        return ""

    @functools.cached_property
    def _quantiser(self) -> BodyWay | None:
        """The kernels of the values, which note what they find with this codec's findings."""
        if not isinstance(self.codec, Selected):
            return None
        quantiser = self.codec.quantiser
        assert isinstance(quantiser, KernelCodec)
        way = KERNELS.get(quantiser.name)(quantiser, self.device)
        way.__dict__["findings"] = self.findings
        return way

    @functools.cached_property
    def _chooser(self) -> TopK:
        assert isinstance(self.codec.chooser, TopK)
        return self.codec.chooser

    def _form(self, numel: int) -> indices.Form:
        return indices.form_of(numel, self._chooser.max_count(numel))

    def encode_selection(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """As `Sparse.encode_selection`."""
        write = functools.partial(self._write, selection=True)
        return self.encoded(self.checked(x), self.checked_residual(x, residual), step, out, write)

    def write_payload(self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int]) -> None:
        self._write(x, v, step, words, header)

    def _write(
        self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int], selection: bool = False
    ) -> None:
        begin(words, header)
        form, quantiser, feedback = self._form(v.numel()), self._quantiser, x is not v
        words[HEADER_WORDS : form.values_at].zero_()
        clear = feedback and (selection or quantiser is None)
        values, values_at, chosen = words, form.values_at, words.new_empty(1, dtype=torch.int64)
        if quantiser is not None:
            values, values_at, chosen = words.new_empty(form.chosen), 0, words.new_empty(form.chosen, dtype=torch.int64)
        if v.numel():
            tail = (values_at, form.width, form.low_nbits)
            options = {"CLEAR": clear, "BITMAP": form.bitmap, "LIST": quantiser is not None}
            select = self._put_whole if self._chooser.bucket is None else self._put_buckets
            top = select(x, v, words, values, chosen, form.chosen, tail, options)
            words[HEADER_WORDS : HEADER_WORDS + 1] = torch.where(top >= INFINITY, -1, form.chosen)
        if quantiser is not None:
            section, floats = words[form.values_at :], values.view(torch.float32)
            head = header_words(quantiser.codec.wire_name, form.chosen, quantiser.max_nbytes(form.chosen))
            quantiser.write_payload(floats, floats, step, section, head)
            if feedback and not selection:
                quantiser.read_payload(section, floats, False)
                v.index_add_(0, chosen, floats, alpha=-1)
        words[3:4] += self.body_sum(words, self.max_nbytes(v.numel()))

    def _put_whole(
        self, x: Tensor, v: Tensor, words: Tensor, values: Tensor, chosen: Tensor,
        count: int, tail: tuple[int, int, int], options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Put the `count` largest of v; returns a key from INFINITY up where v is not finite."""
        numel = v.numel()
        blocks = -(-numel // BLOCK)
        digits, bound = words.new_zeros(len(DIGITS), 256), words.new_zeros(2)
        bound[1:].fill_(count)
        places, bits = words.new_empty(2, numel)
        collected, above, ties = words.new_empty(3, blocks)
        for ragged, first, programs in runs(numel, COUNTED):
            launch(count_octaves, programs, x, v, digits[0], numel, first, num_warps=8,
                   FEEDBACK=x is not v, RAGGED=ragged, VALUES=COUNTED)  # fmt: skip
        launch(find_digit, 1, digits[0], bound, SHIFT=DIGITS[0][0])
        for ragged, first, programs in runs(numel, BLOCK):
            launch(collect, programs, v, bound, places, bits, collected, numel, first, num_warps=8,
                   RAGGED=ragged, VALUES=BLOCK)  # fmt: skip
        for (shift, end, mask), counts in zip(DIGITS[1:], digits[1:], strict=True):
            launch(count_digits, blocks, bits, collected, bound, counts, SHIFT=shift, END=end, MASK=mask, VALUES=BLOCK)
            launch(find_digit, 1, counts, bound, SHIFT=shift)
        launch(count_chosen, blocks, bits, collected, bound, above, ties, VALUES=BLOCK)
        ties_before = torch.cumsum(ties, 0, dtype=torch.int32) - ties
        each = above + torch.minimum((bound[1] - ties_before).clamp_(min=0), ties)
        before = torch.cumsum(each, 0, dtype=torch.int32) - each
        launch(put_chosen, blocks, places, bits, collected, bound, ties_before, before, v, words, values, chosen, *tail,
               num_warps=8, VALUES=BLOCK, **options)  # fmt: skip
        return torch.where(digits[0, 255:] > 0, INFINITY, 0)

    def _put_buckets(
        self, x: Tensor, v: Tensor, words: Tensor, values: Tensor, chosen: Tensor,
        count: int, tail: tuple[int, int, int], options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Put the largest of every bucket of v; returns the largest key."""
        bucket, numel, top = self._chooser.bucket or 1, v.numel(), words.new_zeros(1)
        each, last = share(self._chooser.fraction, bucket), share(self._chooser.fraction, numel % bucket)
        options = {**options, "FEEDBACK": x is not v, "BUCKET": bucket, "num_warps": _bucket_warps(bucket)}
        for ragged, first, programs in runs(numel, bucket):
            wanted = last if ragged else each
            launch(put_bucket, programs, x, v, words, values, chosen, top, numel, first, wanted, each, *tail,
                   RAGGED=ragged, **options)  # fmt: skip
        return top

    def read_payload(self, words: Tensor, out: Tensor, add: bool) -> None:
        where, values = self._unpacked(words, out.numel())
        if add:
            out.index_add_(0, where, values)
        else:
            out.zero_().index_copy_(0, where, values)

    def _unpacked(self, words: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """A payload's indices and values; indices that no encoder would write are noted, and are none."""
        form, quantiser = self._form(numel), self._quantiser
        values = words[form.values_at : form.values_at + form.chosen].view(torch.float32)
        if quantiser is not None:
            values = torch.empty(form.chosen, dtype=torch.float32, device=self.device)
            quantiser.read_payload(words[form.values_at :], values, False)
        if not form.chosen:
            return words.new_empty(0, dtype=torch.int64), values
        where, wrong = indices.unpacked(words, form, numel)
        self.findings[CORRUPT] += wrong.to(torch.int32)
        return where, values

    # what is looked at before a payload is trusted

    def scales(self, numel: int) -> int:
        return min(1, numel)

    def finite(self, scales: Tensor, numel: int) -> Tensor:
        """The count, where there is one, is −1 for values that are not finite."""
        return (scales >= 0).all()

    def refuse(self, v: Tensor) -> NoReturn:
        raise_non_finite(v.cpu().numpy(), self.codec)

    def check_here(self, payload: Tensor, numel: int) -> None:
        chosen, expected = self.codec.decode_sparse(payload, numel)[0].numel(), self._form(numel).chosen
        if chosen != expected:
            raise PayloadError(f"{self}: payload selects {chosen} of {numel} values, not {expected}")

    def words_there(self, payload: Tensor, numel: int) -> Tensor:
        words, form = super().words_there(payload, numel), self._form(numel)
        wrong = (words[HEADER_WORDS] != form.chosen) | (words[HEADER_WORDS + 1] != 0)
        if self._quantiser is not None:
            section = words.view(torch.uint8)[4 * form.values_at : payload.numel()]
            self._quantiser.words_there(section, form.chosen)
        else:
            wrong |= ~words[form.values_at :].view(torch.float32).isfinite().all()
        self.findings[CORRUPT] += wrong.to(torch.int32)
        return words
