"""How fast each codec is on this machine, beside memcpy and beside its peers, in one interleaved run.

Called by `laconic bench codecs`. Every operation of every codec is timed once per repeat, in turn, so that a slow
minute of the machine falls on all of them; memcpy of the same tensor is timed before each codec. All buffers are
allocated and touched before the first repeat, and one untimed repeat compiles the kernels.

Figures are nanoseconds per element: the median of the repeats and its 95 % interval by ranks (Hoefler and Belli,
Scientific Benchmarking of Parallel Computing Systems, SC'15). Ratios are of medians. The least of the repeats is kept
too: on a machine shared with others it is nearer to what the code itself takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic import codecs, statistics
from laconic.codecs import Codec
from laconic.errors import BadInput
from laconic_lab.bench import codec_peers
from laconic_lab.bench.codec_peers import Operation
from laconic_lab.bench.turns import Turns, Way, seconds_of
from laconic_lab.environment import environment

NUMEL = 16_777_216
MORE = ("qsgd(4)", "linear8(stochastic=true)", "topk(0.01)", "topk(0.01)+qsgd(4)", "dynamic8+entropy")  # to measure
ON_NORMAL = {"threshold": "threshold(2.5)"}  # its default suits gradients; of N(0,1) it would select nearly all
OPERATIONS = ("encode", "decode", "decode_add", "encode_feedback")


def default_specs() -> list[str]:
    """One spec per registered vector codec, those with a target, and some compositions."""
    plain = [name for name in codecs.names() if codecs.get(name).kind in ("quantiser", "selector")]
    specs = [*(ON_NORMAL.get(name) or codecs.simplest_spec(name) for name in plain), *MORE]
    return list(dict.fromkeys(str(codecs.codec(spec)) for spec in specs))


def run(
    specs: Sequence[str] | None = None,
    *,
    numel: int = NUMEL,
    threads: int = 1,
    repeats: int = 9,
    seed: int = 0,
    peers: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure codecs and peers on N(0, 1) values; returns the JSON-ready record `laconic bench codecs --json` prints.

    Args:
        specs: codec specs; None for `default_specs()`.
        repeats: timed repeats, after one untimed.
        progress: called with (repeats done, repeats in all), the untimed one included.

    Raises:
        BadInput: numel, threads or repeats below 1, or a spec that names no codec.

    >>> record = run(["none"], numel=1000, repeats=2, peers=False)
    >>> record["results"][0]["nbytes"]
    4016
    """
    if min(numel, threads, repeats) < 1:
        raise BadInput(f"numel, threads and repeats must be at least 1, got {numel}, {threads}, {repeats}")
    chosen = [codecs.codec(spec) for spec in (default_specs() if specs is None else specs)]
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        bench = _Bench(x, max((c.max_nbytes(numel) for c in chosen), default=0))
        contenders = [_Contender(str(c), bench.operations(c)) for c in chosen]
        found, absent = codec_peers.find(x, bench.out, threads) if peers else ([], [])
        rivals = [_Contender(peer.label, peer.operations, peer.about) for peer in found]
        everyone = {f"{place} {each.label}": each for place, each in enumerate([*contenders, *rivals])}
        ways = {name: Way(partial(each.measure, bench.copy)) for name, each in everyone.items()}
        times = Turns(ways).run(repeats, progress=progress or (lambda done, total: None))
        for name, each in everyone.items():
            each.seconds = times[name]
        memcpy = _timing("memcpy", [s for found in times.values() for s in found["memcpy"]] or [math.nan], numel)
        base_ns = memcpy["memcpy_ns"]
        results = [
            {"codec": c.label, **_row(c, numel, base_ns), **bench.quality(codec)}
            for c, codec in zip(contenders, chosen, strict=True)
        ]
        rival_rows = [{"peer": r.label, "installed": True, **r.about, **_row(r, numel, base_ns)} for r in rivals]
    return {
        **memcpy,
        "results": results,
        "peers": [*rival_rows, *absent],
        "configuration": {
            "numel": numel, "threads": threads, "repeats": repeats, "warm_up": 1, "seed": seed, "values": "N(0,1)",
            "statistic": "median and 95 % rank interval, ns per element", "timer": "time.perf_counter",
        },
        "environment": environment(),
    }  # fmt: skip


class _Contender:
    """Something timed: a label and its operations, run in order once per repeat."""

    def __init__(self, label: str, operations: dict[str, Operation], about: dict[str, Any] | None = None) -> None:
        self.label = label
        self.operations = operations
        self.about = about or {}
        self.seconds: dict[str, list[float]] = {}

    def measure(self, copy: Operation) -> dict[str, float]:
        """Seconds of memcpy, then of every operation; those that begin with `_` prepare the next one."""
        taken = {name: seconds_of(operation) for name, operation in {"memcpy": copy, **self.operations}.items()}
        return {name: seconds for name, seconds in taken.items() if not name.startswith("_")}


class _Bench:
    """The buffers every codec shares, and the operations over them."""

    def __init__(self, x: Tensor, payload_nbytes: int) -> None:
        self.x = x
        self.out = torch.zeros_like(x)
        self.residual = torch.zeros_like(x)
        self.buffer = torch.zeros(payload_nbytes, dtype=torch.uint8)

    def copy(self) -> None:
        """Copy the tensor: the baseline of all comparisons."""
        self.out.copy_(self.x)

    def operations(self, codec: Codec) -> dict[str, Operation]:
        """Encode, decode, decode_add and encode_feedback of `codec`, on the shared buffers."""
        held: dict[str, Tensor] = {}

        def encode() -> None:
            held["payload"] = codec.encode(self.x, out=self.buffer)

        return {
            "encode": encode,
            "decode": lambda: codec.decode(held["payload"], self.x.numel(), out=self.out),
            "decode_add": lambda: codec.decode_add(held["payload"], self.out),
            "_reset": self.residual.zero_,
            "encode_feedback": lambda: codec.encode_feedback(self.x, self.residual, out=self.buffer),
        }

    def quality(self, codec: Codec) -> dict[str, Any]:
        """Payload size and mean errors of one encoding of x."""
        payload = codec.encode(self.x, out=self.buffer)
        codec.decode(payload, self.x.numel(), out=self.out)
        relative, absolute = mean_errors(self.x, self.out)
        nbytes = payload.numel()
        return {
            "nbytes": nbytes,
            "bits_per_element": 8 * nbytes / self.x.numel(),
            "mean_rel_error": relative,
            "mean_abs_error": absolute,
        }


def _row(contender: _Contender, numel: int, memcpy_ns: float) -> dict[str, Any]:
    """Times of each operation, and their ratios to memcpy."""
    row: dict[str, Any] = {}
    for operation in OPERATIONS:
        if operation not in contender.seconds:
            continue
        row |= _timing(operation, contender.seconds[operation], numel)
        row[f"{operation}_ratio"] = row[f"{operation}_ns"] / memcpy_ns
    return row


def _timing(name: str, samples: Sequence[float], numel: int) -> dict[str, Any]:
    """Nanoseconds per element over the repeats: median, its 95 % rank interval, and the least.

    >>> _timing("encode", [3e-9, 1e-9, 2e-9], 1)
    {'encode_ns': 2.0, 'encode_ns_interval': [1.0, 3.0], 'encode_ns_least': 1.0}
    """
    ns = [seconds * 1e9 / numel for seconds in samples]
    found = statistics.median(ns)
    return {f"{name}_ns": found.value, f"{name}_ns_interval": [*found.interval], f"{name}_ns_least": min(ns)}


def mean_errors(x: Tensor, approximation: Tensor, chunk: int = 1 << 20) -> tuple[float, float]:
    """Mean relative error over the non-zero x, and mean absolute error, summed in float64.

    >>> mean_errors(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))
    (0.5, 1.0)
    """
    absolute = relative = 0.0
    nonzero = 0
    for a, b in zip(torch.split(x, chunk), torch.split(approximation, chunk), strict=True):
        wide = a.double()
        error = (b.double() - wide).abs()
        mask = wide != 0
        absolute += float(error.sum())
        relative += float((error[mask] / wide[mask].abs()).sum())
        nonzero += int(mask.sum())
    return relative / max(nonzero, 1), absolute / max(x.numel(), 1)
