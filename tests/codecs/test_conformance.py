"""The laws every codec keeps, checked on every registered codec and some compositions.

Registering a codec is enough to be tested: see `subjects.py`.
"""

from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from subjects import ALL, SINGLE, parts, reference, same_bits, tensors, values

from laconic import codecs
from laconic.codecs import frame
from laconic.errors import BadInput, NonFiniteError, PayloadError

few = settings(max_examples=12)
every_codec = pytest.mark.parametrize("spec", ALL)
every_single_codec = pytest.mark.parametrize("spec", SINGLE)
steps = st.integers(0, 2**40)
EDGES = [torch.zeros(0), torch.zeros(1), torch.tensor([-1.5]), torch.full((33,), 1e-45), values("normal", 8193, 7)]

# Casts whose documented policy is to carry NaN and infinity through (checked in their own tests).
CARRIES_NON_FINITE = tuple(name for name in codecs.names() if codecs.get(name).fine)
# Casts whose documented policy is to turn finite values beyond their range into infinity.
OVERFLOWS = ("bf16", "fp16")
# Codecs whose feedback uses x and the residual apart, so that its payload is not that of their sum (documented there).
FEEDBACK_LOOKS_AHEAD = ("adacomp",)
# Infinities, NaN, the largest floats, and the largest exponents that flexpoint has.
WORDS = (0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF, 0xFFFFFFFF, 121, 113)
# (numel, index of the bad value): first, last, in a later block, in the tail after many blocks.
PLACES = [(1, 0), (10, 9), (513, 512), (5000, 0), (5000, 4500), (1_100_003, 1_100_002)]


def edges(test):
    """Always include the empty, the single, the smallest denormal and a few blocks."""
    for x in EDGES:
        test = example(x=x, step=0)(test)
    return test


@every_codec
@few
@edges
@given(x=tensors(), step=steps)
def test_payload_has_the_declared_form_and_size(spec, x, step):
    codec = codecs.codec(spec)
    payload = codec.encode(x, step=step)
    assert payload.dtype == torch.uint8
    assert payload.dim() == 1
    limit = codec.max_nbytes(x.numel())
    assert payload.numel() == limit if codec.fixed_size else 16 <= payload.numel() <= limit


@every_codec
@few
@edges
@given(x=tensors(), step=steps)
def test_encode_is_a_pure_function_and_leaves_its_input_alone(spec, x, step):
    codec = codecs.codec(spec)
    before = x.clone()
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = codec.encode(x, step=step)
    decoded = codec.decode(first, x.numel())
    assert same_bits(first, codec.encode(x.clone(), step=step))
    assert same_bits(decoded, codec.decode(first.clone(), x.numel()))
    assert same_bits(x, before)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.array_equal(np.random.get_state()[1], generators[1])  # noqa: NPY002
    assert random.getstate() == generators[2]


@every_single_codec
@few
@edges
@given(x=tensors(), step=steps)
def test_payload_and_values_match_the_reference_bit_for_bit(spec, x, step):
    codec = codecs.codec(spec)
    frame = importlib.import_module("reference.frame")
    encode_body, decode_body = reference(codec, step, x.numel())
    payload = codec.encode(x, step=step)
    body = encode_body(x.numpy())
    assert body.dtype == np.uint8
    assert np.array_equal(payload[16:].numpy(), body)
    name = getattr(codec, "wire_name", codec.name)
    assert np.array_equal(payload.numpy(), frame.payload(name, x.numel(), body.tobytes()))
    expected = torch.from_numpy(np.asarray(decode_body(body), dtype=np.float32))
    assert same_bits(codec.decode(payload, x.numel()), expected)


@every_codec
@few
@edges
@given(x=tensors(), step=steps)
def test_finite_values_stay_finite(spec, x, step):
    codec = codecs.codec(spec)
    if set(parts(spec)) & set(OVERFLOWS):
        x = x.clamp(-1, 1)
    decoded = codec.decode(codec.encode(x, step=step), x.numel())
    assert decoded.shape == x.shape
    assert decoded.dtype == torch.float32
    assert bool(decoded.isfinite().all())


@every_codec
@few
@edges
@given(x=tensors(), step=steps)
def test_decode_add_is_decode_then_add(spec, x, step):
    codec = codecs.codec(spec)
    payload = codec.encode(x, step=step)
    total = values("normal", x.numel(), 1)
    expected = total + codec.decode(payload, x.numel())
    assert codec.decode_add(payload, total) is None
    assert torch.equal(total, expected) or torch.equal(total.isnan(), expected.isnan())
    assert same_bits(total, expected)


@every_codec
@few
@edges
@given(x=tensors(), step=steps)
def test_decode_mean_is_decode_add_and_divide(spec, x, step):
    codec = codecs.codec(spec)
    payloads = [codec.encode(each, step=step) for each in (x, *(values("normal", x.numel(), 1 + k) for k in range(2)))]
    total, out = codec.decode(payloads[0], x.numel()), torch.full_like(x, 7.0)
    for count in (1, 2, 3):
        if count > 1:
            codec.decode_add(payloads[count - 1], total)
        for divisor in (1, count, 4):
            assert codec.decode_mean(payloads[:count], divisor, out) is None
            assert same_bits(out, total / divisor)


@every_codec
@few
@edges
@given(x=tensors(), step=steps)
def test_given_buffers_are_used(spec, x, step):
    codec = codecs.codec(spec)
    limit = codec.max_nbytes(x.numel())
    room = torch.full((limit + 5,), 0xA5, dtype=torch.uint8)
    payload = codec.encode(x, step=step, out=room)
    assert payload.data_ptr() == room.data_ptr()
    assert bool((room[limit:] == 0xA5).all()), "encode wrote past max_nbytes"
    assert same_bits(payload, codec.encode(x, step=step))
    out = torch.full((x.numel(),), 7.0)
    decoded = codec.decode(payload, x.numel(), out=out)
    assert decoded.data_ptr() == out.data_ptr()
    assert same_bits(out, codec.decode(payload, x.numel()))


@every_codec
@few
@edges
@given(x=tensors(kinds=("normal", "uniform", "zeros", "constant", "sparse", "one_hot", "denormal")), step=steps)
def test_feedback_keeps_what_was_not_sent(spec, x, step):
    """residual_after == (residual_before + x) − decode(payload), in float32, and the payload is that of the sum."""
    codec = codecs.codec(spec)
    residual = values("normal", x.numel(), 3).mul_(0.1)
    carried = residual + x
    kept = x.clone()
    payload = codec.encode_feedback(x, residual, step=step)
    if codec.name not in FEEDBACK_LOOKS_AHEAD:
        assert same_bits(payload, codec.encode(carried, step=step))
    assert same_bits(residual, carried - codec.decode(payload, x.numel()))
    assert same_bits(x, kept)
    room = torch.zeros(codec.max_nbytes(x.numel()), dtype=torch.uint8)
    again = values("normal", x.numel(), 3).mul_(0.1)
    assert codec.encode_feedback(x, again, step=step, out=room).data_ptr() == room.data_ptr()
    assert same_bits(room[: payload.numel()], payload)


@every_codec
def test_any_number_of_threads_gives_the_same_bits(spec):
    codec = codecs.codec(spec)
    numel = 2_500_003
    x = values("normal", numel, 11)
    answers = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        payload = codec.encode(x, step=5)
        total, residual = x.clone(), x.clone()
        codec.decode_add(payload, total)
        fed = codec.encode_feedback(x, residual, step=5)
        answers.append((payload, codec.decode(payload, numel), total, fed, residual))
    for other in answers[1:]:
        assert all(same_bits(a, b) for a, b in zip(answers[0], other, strict=True))
    assert same_bits(answers[0][2], x + answers[0][1])


@pytest.mark.parametrize("spec", [spec for spec in ALL if parts(spec)[0] not in CARRIES_NON_FINITE])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_is_refused(spec, bad):
    codec = codecs.codec(spec)
    names = "|".join(parts(spec))
    for numel, where in PLACES:
        x = values("normal", numel, 2)
        x[where] = bad
        kept = x.clone()
        with pytest.raises(NonFiniteError, match=names):
            codec.encode(x)
        with pytest.raises(NonFiniteError, match=names):
            codec.encode_feedback(x, torch.zeros(numel))
        assert same_bits(x, kept)


@every_codec
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, 4),
        torch.zeros(()),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8, dtype=torch.float16),
        torch.zeros(8, dtype=torch.int32),
        torch.zeros(16)[::2],
    ],
    ids=["matrix", "scalar", "float64", "float16", "int32", "strided"],
)
def test_input_that_is_no_flat_float32_is_refused(spec, x):
    codec = codecs.codec(spec)
    with pytest.raises(BadInput):
        codec.encode(x)
    with pytest.raises(BadInput):
        codec.decode_add(codec.encode(torch.zeros(x.numel())), x)
    with pytest.raises(BadInput):
        codec.decode(codec.encode(torch.zeros(x.numel())), x.numel(), out=x)


@every_codec
def test_buffers_that_do_not_fit_are_refused(spec):
    codec = codecs.codec(spec)
    x = values("normal", 100, 4)
    payload = codec.encode(x)
    need = codec.max_nbytes(100)
    for room in (
        torch.zeros(need - 1, dtype=torch.uint8),
        torch.zeros(need, dtype=torch.int16),
        torch.zeros(2 * need, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(BadInput):
            codec.encode(x, out=room)
    for out in (torch.zeros(99), torch.zeros(101), torch.zeros(100, dtype=torch.float64)):
        with pytest.raises(BadInput):
            codec.decode(payload, 100, out=out)
    for residual in (torch.zeros(99), torch.zeros(101), torch.zeros(100, dtype=torch.float64), torch.zeros(10, 10)):
        with pytest.raises(BadInput):
            codec.encode_feedback(x, residual)


@every_codec
@settings(few, max_examples=6)
@given(x=tensors(kinds=("normal", "sparse"), sizes=(1, 2, 9, 65, 513, 4097)), data=st.data())
def test_damaged_payloads_are_refused_and_the_sum_is_untouched(spec, x, data):
    codec = codecs.codec(spec)
    numel = x.numel()
    payload = codec.encode(x)
    bit = data.draw(st.integers(0, 8 * payload.numel() - 1))
    flipped = payload.clone()
    flipped[bit // 8] ^= 1 << bit % 8
    damaged = {
        "flipped": (flipped, numel),
        "empty": (payload[:0], numel),
        "header only": (payload[:16] if payload.numel() > 16 else payload[:15], numel),
        "truncated": (payload[:-1], numel),
        "truncated anywhere": (payload[: data.draw(st.integers(0, payload.numel() - 1))], numel),
        "extended": (torch.cat([payload, payload.new_zeros(1)]), numel),
        "doubled": (torch.cat([payload, payload]), numel),
        "one value more": (payload, numel + 1),
        "one value less": (payload, numel - 1) if numel else (flipped, numel),
        "shifted": (torch.roll(payload, 1), numel) if len(payload.unique()) > 1 else (flipped, numel),
        "other dtype": (payload.to(torch.int16), numel),
        "matrix": (payload.reshape(1, -1), numel),
    }
    for what, (bad, expected_numel) in damaged.items():
        out = values("normal", expected_numel, 6)
        kept = out.clone()
        with pytest.raises(PayloadError):
            codec.decode(bad, expected_numel)
        with pytest.raises(PayloadError):
            codec.decode(bad, expected_numel, out=out)
        with pytest.raises(PayloadError):
            codec.decode_add(bad, out)
        assert same_bits(out, kept), what
        for pair in ([payload, bad], [bad, payload]):
            with pytest.raises(PayloadError):
                codec.decode_mean(pair, 2, out)


@pytest.mark.parametrize("spec", [spec for spec in ALL if parts(spec)[0] not in CARRIES_NON_FINITE])
def test_nothing_but_finite_values_is_decoded_under_a_valid_checksum(spec):
    """A word of a body is infinite, NaN or as large as can be, and the codes after it are those at their ends."""
    codec, numel = codecs.codec(spec), 40
    payload = codec.encode(values("normal", numel, 11)).clone()
    for word, fill in itertools.product(WORDS, (None, 0xFF, 0x80)):
        for at in range(16, min(payload.numel() - 3, 48), 4):
            forged = payload.clone()
            if fill is not None:
                forged[at + 4 :] = fill
            forged[at : at + 4] = torch.tensor([word]).view(torch.uint8)[:4]
            forged = frame.seal(forged, getattr(codec, "wire_name", codec.name), numel, forged.numel())
            total = torch.ones(numel)
            try:
                decoded = codec.decode(forged, numel)
                codec.decode_add(forged, total)
            except PayloadError:
                assert bool((total == 1).all())
                continue
            assert bool(decoded.isfinite().all()), (hex(word), fill, at)


@every_codec
def test_payloads_of_other_codecs_are_refused(spec):
    codec = codecs.codec(spec)
    x = values("normal", 600, 8)
    others = [other for other in ALL if parts(other) != parts(spec)]
    assert others
    for other in others:
        with pytest.raises(PayloadError):
            codec.decode(codecs.codec(other).encode(x), 600)


@every_codec
def test_negative_numel_is_refused(spec):
    codec = codecs.codec(spec)
    with pytest.raises((BadInput, PayloadError)):
        codec.decode(codec.encode(torch.zeros(3)), -1)


@every_codec
def test_sizes_beyond_32_bits_are_counted_right(spec):
    """max_nbytes is arithmetic only: it must neither overflow nor shrink past 2³¹ elements."""
    codec = codecs.codec(spec)
    sizes = [codec.max_nbytes(numel) for numel in (0, 1, 2**20, 2**31 - 1, 2**31 + 8192, 2**33, 2**36)]
    assert all(isinstance(nbytes, int) for nbytes in sizes)
    assert sizes == sorted(sizes)
    assert sizes[0] >= 16
    per_element = sizes[2] / 2**20
    assert sizes[-1] / 2**36 == pytest.approx(per_element, rel=0.02, abs=0.01) or sizes[-1] / 2**36 < per_element


@every_codec
def test_spec_string_builds_an_equal_codec(spec):
    codec = codecs.codec(spec)
    again = codecs.codec(str(codec))
    assert again == codec
    assert str(again) == str(codec)
    assert hash(again) == hash(codec)
    assert codecs.codec(codec) is codec


@every_codec
def test_codec_says_what_a_user_must_know(spec):
    codec = codecs.codec(spec)
    assert isinstance(codec.fixed_size, bool)
    assert isinstance(codec.unbiased, bool)
    assert isinstance(codec.stochastic, bool)
    assert codec.summary
    assert codec.source
    assert "\n" not in codec.summary


@every_codec
def test_exact_means_that_the_payload_is_the_values_themselves(spec):
    """An exact codec may be left out by whoever sends: its body is x, bit for bit, and no other codec's is."""
    codec = codecs.codec(spec)
    x = values("mixed", 4097, 3)
    body = codec.encode(x).clone()[16:]
    assert codec.exact is (str(codec) == "none")
    assert codec.exact is same_bits(body, x.view(torch.uint8))


@every_codec
def test_stochastic_means_what_it_says(spec):
    """A stochastic codec's payload changes with the step; a deterministic one's does not."""
    codec = codecs.codec(spec)
    x = values("normal", 2000, 9)
    assert same_bits(codec.encode(x, step=1), codec.encode(x, step=2)) is not codec.stochastic


def test_public_names_are_sorted_and_exist():
    assert codecs.__all__ == sorted(codecs.__all__)
    assert all(hasattr(codecs, name) for name in codecs.__all__)


def test_unknown_codec_lists_the_valid_ones():
    with pytest.raises(BadInput, match="dynamic8"):
        codecs.codec("dynamci8")
    with pytest.raises(BadInput, match="spec string"):
        codecs.codec(8)  # type: ignore[arg-type]


MODULES = ["laconic.codecs", *(f"laconic.codecs.{module.name}" for module in pkgutil.iter_modules(codecs.__path__))]


@pytest.mark.parametrize("module", [*MODULES, "laconic_lab.bench.codec_speed"])
def test_examples_in_docstrings_run(module):
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


def test_every_registered_codec_has_a_runnable_example():
    for name in codecs.names():
        assert ">>> " in (codecs.get(name).__doc__ or ""), name
