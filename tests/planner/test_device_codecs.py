"""What codecs cost on devices that are not here: a model, from the bytes that their kernels move as compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.planner.codec_speeds import KERNEL_NBYTES, speeds
from laconic.planner.devices import TABLE

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "device_kernels.json"


@pytest.mark.parametrize("name", sorted(KERNEL_NBYTES))
def test_the_bytes_are_those_of_the_compiled_kernels(name: str) -> None:
    record = json.loads(RECORD.read_text())
    found = {row["kernel"]: row["nbytes_per_value"] for row in record["kernels"]}
    found |= {f"qsgd {what}": found[f"qsgd(4) {what}"] for what in ("encode_feedback", "decode_add")}
    found["topk decode_add"] = found["topk count bits"] + found["topk unpack"]
    for together, launches in record["together"].items():
        found[together] = sum(times * found[kernel] for kernel, times in launches.items())
    encode, decode = KERNEL_NBYTES[name]
    assert encode == pytest.approx(found[f"{name} encode_feedback"], rel=0.01)
    assert decode == pytest.approx(found[f"{name} decode_add"], rel=0.01)


def test_a_kernel_is_quicker_than_the_host_and_old_devices_have_none() -> None:
    specs = ("dynamic8", "natural")
    modern = speeds(specs, TABLE["a100"], None)
    assert all(kernel < host for kernel, host in zip(modern["dynamic8"], modern[specs[1]], strict=True))
    old = speeds(specs, TABLE["titan-x"], None)
    assert old["dynamic8"] == old[specs[1]]


def test_a_faster_bus_makes_codecs_quicker() -> None:
    h100, l40s = (speeds(("dynamic8",), TABLE[name], None)["dynamic8"] for name in ("h100", "l40s"))
    assert h100 < l40s
