"""Kernels executed by Triton's interpreter: payloads byte for byte, residuals and sums bit for bit the processor's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SPECS = ("none", "fp16", "bf16", "dynamic8", "fp8", "linear8", "mantissa8",
         "onebit", "qsgd", "sign", "static8", "ternary", "topk")  # fmt: skip


PROCESSES = 2


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[int, list[str]]]:
    found = {}
    for process in [_start(number) for number in range(PROCESSES)]:
        answers, said = process.communicate(timeout=400)
        assert process.returncode == 0, said[-3000:]
        found |= {spec: (cases, wrong) for spec, cases, wrong in map(json.loads, answers.splitlines())}
    return found


def _start(number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.codecs.device.interpreted", str(number), str(PROCESSES)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(420)
def test_every_kernel_gives_the_processors_bits(results: dict[str, tuple[int, list[str]]]) -> None:
    wrong = {spec: found for spec, (_, found) in results.items() if found}
    assert not wrong, "\n".join(f"{spec}: {len(found)} cases, first: {found[0]}" for spec, found in wrong.items())


@pytest.mark.parametrize("spec", SPECS)
def test_a_codec_that_is_promised_a_kernel_has_one(spec: str, results: dict[str, tuple[int, list[str]]]) -> None:
    cases, _ = results[spec]
    assert cases > 25
