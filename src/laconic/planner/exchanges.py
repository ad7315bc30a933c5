"""What an exchange takes on a link: the schedules' closed forms, with codecs at their speed.

Callers: `predict.py`. Codecs' speeds on this machine are measured once and kept; elsewhere they follow from the bytes
that are moved, in the device's memory and over its bus: a model. The formulas are those of `exchange.chooser`, which
chooses by them while training.
"""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path

from laconic.codecs import codec
from laconic.exchange.chooser import CodecCost, cost_of, speed_of
from laconic.operators.machine import measurements
from laconic.planner.devices import HERE, Device
from laconic.schedules import registry
from laconic.schedules.link import Link

ALGORITHMS = ("butterfly", "rabenseifner", "ring", "tree")
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


@functools.lru_cache(maxsize=65536)
def plain(numel: int, ranks: int, link: Link) -> CodecCost:
    """The quickest all-reduce of float32 values."""
    if ranks < 2 or not numel:
        return CodecCost("none", "none", 0.0, 0.0, 0.0)
    seconds = {name: registry.get("all_reduce", name).seconds(ranks, 4 * numel, link) for name in ALGORITHMS}
    name = min(seconds, key=lambda each: seconds[each])
    return CodecCost("none", name, 0.0, seconds[name], 0.0)


@functools.lru_cache(maxsize=65536)
def coded(spec: str, numel: int, ranks: int, link: Link, speed: tuple[float, float]) -> CodecCost:
    """An exchange of `numel` values through a codec, with its encoding and decoding."""
    chosen = codec(spec)
    if ranks < 2 or not numel or chosen.exact:
        return plain(numel, ranks, link)
    if chosen.kind == "matrix":
        return _low_rank(spec, numel, ranks, link, speed)
    return cost_of(spec, numel, ranks, link, *speed)


def _low_rank(spec: str, numel: int, ranks: int, link: Link, speed: tuple[float, float]) -> CodecCost:
    """Two all-reduces of factors; the matrix is taken for a square one of `numel` values."""
    factor = plain(max(1, round(math.sqrt(numel) * _matrix_rank(spec))), ranks, link).wire_s
    return CodecCost(spec, "all-reduce of factors", numel * speed[0], 2 * factor, numel * speed[1])


def _matrix_rank(spec: str) -> int:
    """Columns of a low-rank codec's factors; one that sends whole factors is taken for a small one."""
    return int(getattr(codec(spec), "matrix_rank", 4))


def messages(spec: str, ranks: int, algorithm: str) -> int:
    """Messages that one rank sends in an exchange: each takes the time of its processor, whatever it holds."""
    if ranks < 2:
        return 0
    if codec(spec).kind == "matrix":
        return 3 * messages("none", ranks, ALGORITHMS[0])  # two factors, and what is no matrix
    if algorithm in ALGORITHMS:
        return int(registry.get("all_reduce", algorithm).rounds(ranks))
    return ranks - 1 if algorithm == "gather" else 2 * (ranks - 1)


def sent_nbytes(spec: str, numel: int, ranks: int, algorithm: str) -> float:
    """Bytes that one rank sends for `numel` values."""
    if ranks < 2:
        return 0.0
    chosen, share = codec(spec), (ranks - 1) / ranks
    if chosen.exact:
        return float(4 * registry.get("all_reduce", algorithm).sent_numel(ranks, numel) / ranks)
    if chosen.kind == "matrix":
        return 2 * share * 2 * 4.0 * _matrix_rank(spec) * math.sqrt(numel)
    nbytes = float(chosen.max_nbytes(numel))
    return (ranks - 1) * nbytes if algorithm == "gather" else 2 * share * nbytes


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
    pace = MATRIX_PRODUCTS * _matrix_rank(spec) / (device.macs_per_s * device.most)
    return pace, 4.0 / device.bandwidth_Bps
