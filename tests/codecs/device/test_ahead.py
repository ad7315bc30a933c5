"""Every kernel compiles for every architecture without a device, and what comes out keeps the promises about it."""

from __future__ import annotations

import pytest

from laconic.codecs.device.kernels.ahead import ARCHITECTURES, Compiled, compile_for, variants
from laconic.codecs.device.kernels.topk import LAUNCHES

# Bytes a value, to a tenth: scales and the checksum's atomic additions are below that.
LIMITS = {
    "dynamic8 encode_feedback": 13.0,
    "dynamic8 decode_add": 9.0,
    "dynamic8 decode_mean of two": 6.0,
    "linear8 encode_feedback": 13.0,
    "linear8 decode_add": 9.0,
    "linear8 decode_mean of two": 6.0,
    "onebit encode_feedback": 12.5,
    "qsgd(4) encode": 4.7,
}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def compiled(request: pytest.FixtureRequest) -> list[Compiled]:
    return [compile_for(variant, request.param) for variant in variants()]


@pytest.mark.timeout(300)
def test_nothing_spills_fuses_or_moves_by_bytes(compiled: list[Compiled]) -> None:
    assert len(compiled) > 10
    for kernel in compiled:
        assert kernel.registers > 0
        assert (kernel.spilled, kernel.fused, kernel.narrow_loads, kernel.byte_stores) == (0, 0, 0, 0), kernel


def test_bytes_a_value_are_within_the_model(compiled: list[Compiled]) -> None:
    found = {kernel.kernel: kernel.nbytes_per_value for kernel in compiled}
    assert LIMITS.keys() <= found.keys()
    for name, limit in LIMITS.items():
        assert round(found[name], 1) <= limit, name
        assert found[name] > limit / 2, name  # the count has found what the kernel loads


def test_topk_moves_at_most_20_bytes_a_value(compiled: list[Compiled]) -> None:
    found = {kernel.kernel: kernel.nbytes_per_value for kernel in compiled}
    total = sum(times * found[name] for name, times in LAUNCHES.items())
    assert 12 + 4 < total <= 20
