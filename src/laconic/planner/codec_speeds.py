"""Speeds of codecs, for the cost model of an exchange (`exchange/costs.py`).

Callers: `plan.py`, benchmarks. Speeds on this machine are measured once and kept; elsewhere they follow from the bytes
that are moved, in the device's memory and over its bus: a model.
"""

from __future__ import annotations

import time
from pathlib import Path

from laconic.codecs import codec
from laconic.exchange.costs import matrix_rank, speed_of
from laconic.operators.machine import measurements
from laconic.planner.devices import HERE, Device

# Dettmers 2016: 1 ns to encode and 0.5 ns to decode a value on a GTX Titan, whose memory moves 288 GB/s.
_ENCODE_NBYTES, _DECODE_NBYTES = 288.0, 144.0
# Bytes a value that a codec's kernels move in a device's memory, to encode with feedback and to decode and add; as
# compiled (benchmarks/results/device_kernels.json).
KERNEL_NBYTES = {
    "bf16": (14.0, 10.0), "fp16": (14.0, 10.0), "dynamic8": (13.0, 9.0), "linear8": (13.0, 9.0),
    "onebit": (12.2, 8.2), "sign": (12.1, 8.1), "qsgd": (12.5, 8.5), "topk": (19.2, 0.8),
}  # fmt: skip
_LARGE = 2**20  # values of a payload whose size a value is taken
_HOST_ENCODE_S, _HOST_DECODE_S = 1.5e-9, 0.8e-9  # a value, assumed of one core, where a codec has no kernel
MATRIX_PRODUCTS = 4  # of a low-rank codec: M·Q, Mᵀ·P, the sum of both, and the residual


def speeds(specs: tuple[str, ...], device: Device, folder: Path | None) -> dict[str, tuple[float, float]]:
    """Seconds a value of encoding and decoding, for each codec."""
    if device.name != HERE:
        return {spec: _modelled(spec, device) for spec in specs}
    memo = measurements(folder, "planner")
    found_here: dict[str, tuple[float, float]] = {}
    for spec in specs:
        chosen = codec(spec)
        if chosen.exact:
            found_here[spec] = (0.0, 0.0)
        elif chosen.kind == "matrix":
            found_here[spec] = _matrix_pace(spec, device)
        else:
            key = f"codec {spec} by processor time"
            entry = memo.get(key, tuple[float, float])
            if entry is None or min(entry) <= 0:
                entry = speed_of(chosen, time.thread_time)
                memo.put(key, entry, tuple[float, float])
            found_here[spec] = entry
    return found_here


def _modelled(spec: str, device: Device) -> tuple[float, float]:
    """Seconds a value by a codec's kernels and the bus, or by the host's processor where it has none.

    A payload crosses to the host and back. Where the host encodes, the gradient itself does.
    """
    chosen, bus_Bps = codec(spec), device.bus_Bps
    if bus_Bps is None:
        return _ENCODE_NBYTES / device.bandwidth_Bps, _DECODE_NBYTES / device.bandwidth_Bps
    if chosen.kind == "matrix":
        return _matrix_pace(spec, device)
    if chosen.name not in KERNEL_NBYTES:
        return 4 / bus_Bps + _HOST_ENCODE_S, 4 / bus_Bps + _HOST_DECODE_S
    crossing_s = chosen.max_nbytes(_LARGE) / _LARGE / bus_Bps
    encode, decode = (nbytes / device.bandwidth_Bps + crossing_s for nbytes in KERNEL_NBYTES[chosen.name])
    return encode, decode


def _matrix_pace(spec: str, device: Device) -> tuple[float, float]:
    pace = MATRIX_PRODUCTS * matrix_rank(codec(spec)) / (device.macs_per_s * device.most)
    return pace, 4.0 / device.bandwidth_Bps
