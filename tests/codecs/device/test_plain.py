"""Torch operations give the processor's bytes: the ways of `plain/`, and oracles of the kernels' codecs at 2²⁴."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import laconic
from laconic.codecs.device.plain import PLAIN
from laconic.codecs.device.plain.shell import PlainWay
from laconic.codecs.frame import HEADER_NBYTES
from tests.codecs.device import oracles
from tests.codecs.device.conformity import compare
from tests.codecs.subjects import same_bits, specs_of

CPU = torch.device("cpu")
SPECS = [
    spec
    for name in PLAIN.names()
    for spec in [*specs_of(name), *(["dynamic8(100)", "dynamic8(none)"] if name == "dynamic8" else [])]
    if not PLAIN.get(name).why_not(laconic.codec(spec), CPU)
]


def _large() -> tuple[Tensor, Tensor]:
    x, residual = torch.randn(2, 1 << 24, generator=torch.Generator().manual_seed(24)).unbind()
    return x, residual.clone()


@pytest.mark.parametrize("spec", SPECS)
def test_operations_give_the_processors_bits(spec: str) -> None:
    codec = laconic.codec(spec)
    cases, wrong = compare(codec, PlainWay(codec, CPU), first=True)
    assert not wrong, f"{len(wrong)} cases, first: {wrong[0]}"
    assert cases > 25


@pytest.mark.parametrize("spec", ["dynamic8", "linear8", "fp8", "natural"])
def test_operations_give_the_processors_bits_at_16_million_values(spec: str) -> None:
    codec = laconic.codec(spec)
    way, (x, here) = PlainWay(codec, CPU), _large()
    there = here.clone()
    payload = codec.encode_feedback(x, here, step=3)
    assert same_bits(way.encode_feedback(x, there, step=3), payload)
    assert same_bits(there, here)
    assert same_bits(way.decode(payload, x.numel()), codec.decode(payload, x.numel()))


@pytest.mark.parametrize("spec", sorted(oracles.BODIES))
def test_the_processor_has_the_oracles_bytes_at_16_million_values(spec: str) -> None:
    x, residual = _large()
    codec = laconic.codec(spec)
    expected, left = oracles.BODIES[spec](residual + x)
    payload = codec.encode_feedback(x, residual)
    assert same_bits(payload[HEADER_NBYTES:], expected)
    assert same_bits(residual, left)
