"""The 8-bit types: the paper's examples and errors, nearest levels by brute force, the ends of float32's range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from subjects import reference, same_bits, values

from laconic import codecs
from laconic.errors import BadInput, NonFiniteError, PayloadError
from reference import codec_dynamic8, codec_fp8, codec_mantissa8, codec_static8, frame

LEVELS = {
    "dynamic8": codec_dynamic8.levels(),
    "static8": codec_static8.LEVELS,
    "mantissa8": codec_mantissa8.LEVELS,
    "fp8": codec_fp8.LEVELS["e4m3"],
    "fp8(e5m2)": codec_fp8.LEVELS["e5m2"],
    "linear8": [k / 127 for k in range(128)],
}
every_type = pytest.mark.parametrize("spec", LEVELS)


def through(spec: str, x: torch.Tensor) -> torch.Tensor:
    codec = codecs.codec(spec)
    return codec.decode(codec.encode(x), x.numel())


def test_worked_examples_of_the_paper():
    """§3.1 prints 0.2345678 → 0.236719 and 0.0000234 → 0.000019: the tree of (0.1, 0.8). The 1.0 makes the scale 1."""
    decoded = through("dynamic8(upper=0.8)", torch.tensor([1.0, 0.2345678, 0.0000234]))
    assert f"{decoded[1]:.6f}" == "0.236719"
    assert f"{decoded[2]:.6f}" == "0.000019"
    # The tree of (0.1, 1), the interval the paper names, comes closer to both.
    ours = through("dynamic8", torch.tensor([1.0, 0.2345678, 0.0000234]))
    assert f"{ours[1]:.6f}" == "0.233594"
    assert f"{ours[2]:.8f}" == "0.00002125"
    assert through("mantissa8(offset=0)", torch.tensor([0.2345678])).item() == pytest.approx(0.2, rel=1e-6)


# Mean relative errors in per cent, Table 1 of the paper; static and mantissa with its exponent offsets.
TABLE_1 = {
    "uniform": {"dynamic8(none)": 1.39, "linear8(none)": 2.16, "mantissa8(offset=1)": 7.22, "static8(offset=1)": 4.82},
    "1": {"dynamic8(none)": 2.46, "linear8(none)": 6.47, "mantissa8(offset=1)": 6.89, "static8(offset=1)": 6.3},
    "10": {"dynamic8(none)": 2.49, "linear8(none)": 6.44, "mantissa8(offset=2)": 7.19, "static8(offset=2)": 6.28},
    "0.2": {"dynamic8(none)": 2.45, "linear8(none)": 6.15, "mantissa8(offset=1)": 8.26, "static8(offset=1)": 6.58},
}


@pytest.mark.parametrize(("distribution", "spec"), [(d, s) for d, row in TABLE_1.items() for s in row])
def test_relative_error_is_the_papers_or_better(distribution, spec):
    generator = torch.Generator().manual_seed(0)
    numel = 1_000_000  # the paper's 25 million are in `python -m benchmarks approximation`
    if distribution == "uniform":
        x = torch.rand(numel, generator=generator)
    else:
        x = torch.randn(numel, generator=generator) * float(distribution)
    x = x[x != 0]
    error = ((through(spec, x) - x).abs() / x.abs()).double().mean().item() * 100
    assert 0.3 * TABLE_1[distribution][spec] < error < 1.15 * TABLE_1[distribution][spec]


@every_type
@pytest.mark.parametrize("block", ["4096", "none", "100"])
def test_every_value_goes_to_the_nearest_level(spec, block):
    codec = codecs.codec(f"{spec[:-1]}, block={block})" if spec.endswith(")") else f"{spec}(block={block})")
    x = torch.cat([values("normal", 3000, 1), values("mixed", 3000, 2)])
    decoded = codec.decode(codec.encode(x), 6000).double()
    size = {"4096": 4096, "none": 6000, "100": 100}[block]
    levels = torch.tensor(LEVELS[spec], dtype=torch.float64)
    for part, got in zip(x.double().split(size), decoded.split(size), strict=True):
        scale = part.abs().max()
        best = (part.abs()[:, None] - levels * scale).abs().min(dim=1).values
        assert bool(((got - part).abs() <= best + 4e-7 * part.abs()).all())


@pytest.mark.parametrize("spec", ["dynamic8", "static8", "mantissa8", "fp8", "fp8(e5m2)"])
def test_levels_thresholds_and_their_neighbours(spec):
    """Exactly at, just below and just above every threshold and level; 1.0 makes the scale 1."""
    levels = np.array(LEVELS[spec]).astype(np.float32)
    middles = ((levels[1:].astype(np.float64) + levels[:-1]) / 2).astype(np.float32)
    points = np.concatenate([levels, middles, [1.0]]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1))])
    x = torch.from_numpy(np.concatenate([points, -points]))
    codec = codecs.codec(spec)
    encode_body, _ = reference(codec, 0, x.numel())
    assert np.array_equal(codec.encode(x).numpy()[16:], encode_body(x.numpy()))


def test_fp8_levels_are_torchs_8_bit_floats():
    codes = torch.arange(128, dtype=torch.uint8)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        finite = codes.view(dtype).float()
        finite = finite[finite.isfinite()]
        assert codec_fp8.FINITE[name] == finite.tolist()
        x = torch.cat([values("normal", 3000, 3).clamp(-3, 3) * 100, finite[-1:]])
        sent = codecs.codec(f"fp8({name}, block=none)").encode(x)[20:]
        # Dividing by the largest rounds once more than torch's cast does: values next to a tie may go the other way.
        assert (sent != x.to(dtype).view(torch.uint8)).sum() <= 3


@every_type
@pytest.mark.parametrize("exponent", [-149, -148, -140, -127, -126, -101, -100, -99, 0, 99, 100, 101, 126, 127])
def test_every_scale_of_float32_works(spec, exponent):
    """The smallest denormal to the largest float as the largest magnitude of a block."""
    top = np.float32(min(1.9999999 * 2.0**exponent, 3.4028235e38))
    x = torch.from_numpy((np.linspace(-1, 1, 201) * np.float64(top)).astype(np.float32))
    decoded = through(spec, x)
    assert bool(decoded.isfinite().all())
    slack = 2.0**-149  # where values are denormal a product is rounded to a multiple of this
    assert bool(((decoded - x).double().abs() <= 0.07 * float(top) + slack).all())
    assert torch.equal(through(spec, torch.zeros(5)), torch.zeros(5))


@every_type
@pytest.mark.parametrize("exponent", [-60, -110, 110, 127])
def test_codes_do_not_depend_on_the_power_of_two_of_the_scale(spec, exponent):
    """Multiplying by a power of two is exact, so not one of half a million codes may change."""
    x = torch.linspace(-1.9, 1.9, 500_001)
    codec = codecs.codec(f"{spec[:-1]}, block=none)" if spec.endswith(")") else f"{spec}(block=none)")
    if exponent < -100:
        x = x[x.abs() > 1e-3]  # below, the product is denormal and rounded
    assert torch.equal(codec.encode(x * 2.0**exponent)[20:], codec.encode(x)[20:])


@every_type
def test_one_bad_block_does_not_spoil_the_message(spec):
    x = values("normal", 10_000, 5)
    x[9000] = float("nan")
    with pytest.raises(NonFiniteError, match=r"value 9000 of \d+ is nan"):
        codecs.codec(spec).encode(x)


def test_offset_saturates_and_sends_one_scale():
    for spec, top in (("static8(offset=1)", 10 * (0.1 + 0.9 * 15.5 / 16)), ("mantissa8(offset=-2)", 0.15)):
        x = torch.tensor([3e38, -3e38, top, 0.0])
        decoded = through(spec, x)
        assert decoded.tolist() == pytest.approx([top, -top, top, 0.0], rel=1e-6)
        assert codecs.codec(spec).max_nbytes(10_000) == 16 + 4 + 10_000
        with pytest.raises(NonFiniteError):
            codecs.codec(spec).encode(torch.tensor([1.0, float("inf")]))


def test_bytes_are_one_per_value_and_four_per_block():
    for spec in LEVELS:
        codec = codecs.codec(spec)
        assert [codec.max_nbytes(n) for n in (0, 1, 4096, 4097)] == [16, 21, 16 + 4 + 4096, 16 + 8 + 4097]


@every_type
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_forged_scales_are_refused(spec, scale):
    codec = codecs.codec(spec)
    body = np.array([scale], "<f4").tobytes() + bytes(3)
    with pytest.raises(PayloadError, match="scale"):
        codec.decode(torch.from_numpy(frame.payload(codec.wire_name, 3, body).copy()), 3)


def test_stochastic_rounding_is_unbiased_and_independent():
    codec = codecs.codec("linear8(none, stochastic=true, seed=1)")
    x = torch.full((100_000,), 0.3)
    x[0] = 1.0
    errors = torch.stack([codec.decode(codec.encode(x, step=s), x.numel()) - x for s in range(4)])[:, 1:].double()
    step = 1 / 127
    assert errors.abs().max() < step
    assert abs(errors.mean().item()) < 5 * (step / 2) / errors.numel() ** 0.5
    one = errors[0] - errors[0].mean()
    assert abs((one[1:] * one[:-1]).mean() / one.var()) < 5 / one.numel() ** 0.5
    two = errors[1] - errors[1].mean()
    assert abs((one * two).mean() / one.var()) < 5 / one.numel() ** 0.5
    assert codec.unbiased
    assert codec.stochastic
    assert not codecs.codec("linear8").unbiased


@pytest.mark.parametrize("spec", ["dynamic8(none)", "linear8(none)", "static8(offset=1)", "fp8"])
def test_feedback_keeps_exactly_what_was_not_sent_on_threads(spec):
    torch.set_num_threads(2)
    codec = codecs.codec(spec)
    x, residual = values("uniform", 2_200_001, 6), values("uniform", 2_200_001, 7) * 0.01
    carried = residual + x
    payload = codec.encode_feedback(x, residual, step=3)
    assert same_bits(payload, codec.encode(carried, step=3))
    assert same_bits(residual, carried - codec.decode(payload, x.numel()))


@pytest.mark.parametrize("spec", ["dynamic8", "dynamic8(6)", "static8(7)", "fp8(block=none)", "mantissa8(4098)"])
@pytest.mark.parametrize("numel", [1, 7, 8197])
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_payload_at_any_address_is_the_same(spec, numel, shift):
    codec = codecs.codec(spec)
    x = values("normal", numel, 8)
    wanted = codec.encode(x)
    room = torch.zeros(codec.max_nbytes(numel) + shift, dtype=torch.uint8)
    residual = torch.zeros(numel)
    payload = codec.encode_feedback(x, residual, out=room[shift:])
    assert same_bits(payload, wanted)
    decoded = codec.decode(wanted, numel)
    assert same_bits(codec.decode(payload, numel), decoded)
    assert same_bits(residual, x - decoded)
    total = x.clone()
    codec.decode_add(payload, total)
    assert same_bits(total, x + decoded)
    codec.decode_mean([payload, wanted], 3, total)
    assert same_bits(total, (decoded + decoded) / 3)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("fp8", "fp8(e5m2)"), ("fp8(e5m2)", "fp8"), ("dynamic8", "dynamic8(upper=0.8)"),
     ("dynamic8(upper=0.9)", "dynamic8(upper=0.8)"), ("fp8+entropy", "fp8(e5m2)+entropy"),
     ("topk(0.5)+fp8", "topk(0.5)+fp8(e5m2)")],
)  # fmt: skip
def test_codes_of_another_table_are_refused(theirs, ours):
    payload = codecs.codec(theirs).encode(torch.ones(9))
    with pytest.raises(PayloadError):
        codecs.codec(ours).decode(payload, 9)


def test_every_upper_that_is_allowed_has_a_table():
    for upper in np.linspace(0.6, 1, 101):
        assert through(f"dynamic8(upper={float(upper)})", torch.ones(1)).item() == pytest.approx(upper, rel=0.01)


def test_relative_error_of_dynamic8_doubles_per_decade():
    """What the guide states: 64 levels in the first decade below the maximum, half as many in each further one."""
    for decade, percent in enumerate((1.3, 2.6, 5.1, 9.6, 18.0, 33.0)):
        x = torch.from_numpy(np.geomspace(0.1, 1.0, 4096) * 0.1**decade).float()
        y = through("dynamic8(none)", torch.cat([x, torch.ones(1)]))[:-1]
        assert 100 * float(((y - x).abs() / x).mean()) == pytest.approx(percent, rel=0.04)


@pytest.mark.parametrize(
    "spec",
    ["dynamic8(0)", "linear8(-1)", "static8(block=1.5)", "mantissa8(true)", "dynamic8(upper=1.5)", "dynamic8(upper=0)",
     "static8(offset=31)", "mantissa8(offset=0.5)", "fp8(e3m4)", "fp8(8)", "linear8(stochastic=1)", "linear8(seed=x)"],
)  # fmt: skip
def test_bad_options_are_refused(spec):
    with pytest.raises(BadInput):
        codecs.codec(spec)
