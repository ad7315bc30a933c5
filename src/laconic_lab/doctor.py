"""The checks of `laconic doctor`: whether this installation works, and how to fix it if not.

Caller: the command. A check is a function that yields diagnoses; an error that it raises becomes one, too. If
an optional part is missing (MPI, emulated links, a GPU) the diagnosis is a note, never a fault. Trainings run in two
processes over gloo, on the GPU where there is one, and over NCCL where there are two.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import codec
from laconic.consistency.distribute import distribute
from laconic.errors import BadInput, LaconicError, MissingExtra
from laconic.exchange.collectives import all_reduce
from laconic.exchange.hook import compress
from laconic.transports.launcher import run_local
from laconic.transports.probe import probe
from laconic.transports.world import init
from laconic.workloads.models.gpt import CharGPT
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.clusters.launch import is_launched, run_job

VERSION = metadata.version("laconic")
STEPS = 20
OLDEST_TORCH = (2, 6)
DEVICE_VALUES = 2**24  # that every codec encodes on a device
DEVICE_CODECS = (
    "fp16", "bf16", "linear8", "dynamic8", "onebit", "qsgd(4)", "ternary", "topk(0.01)",
    "topk(0.01)+qsgd(4)", "natural",
)  # fmt: skip
Verdict = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check; `figures` go into the record."""

    what: str
    verdict: Verdict
    text: str
    cure: str = ""
    figures: dict[str, float | str] = field(default_factory=dict)


Check = Callable[[], Iterator[Diagnosis]]


def examine(checks: dict[str, Check] | None = None) -> Iterator[Diagnosis]:
    """Run all checks, or these; an error becomes the check's diagnosis."""
    if is_launched():
        raise BadInput("laconic doctor starts processes of its own: call it by itself, not by torchrun or mpiexec")
    for what, check in (CHECKS if checks is None else checks).items():
        try:
            yield from check()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Diagnosis(what, "wrong", text, "report it, with the record")


def record(found: list[Diagnosis]) -> dict[str, Any]:
    """All diagnoses and the machine they are of, to attach to a report."""
    return {"laconic": VERSION, "machine": platform.platform(), "found": [asdict(each) for each in found]}


# what is installed


def _versions() -> Iterator[Diagnosis]:
    names = ("torch", "numpy", "numba", "zmq")
    versions = {name: str(importlib.import_module(name).__version__) for name in names}
    here = f"Laconic {VERSION}, Python {platform.python_version()}, " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )
    newest = tuple(int(part) for part in versions["torch"].split("+")[0].split(".")[:2])
    if sys.version_info < (3, 11) or newest < OLDEST_TORCH:
        yield Diagnosis("versions", "wrong", here, "use Python 3.11 or newer, and torch 2.6 or newer", dict(versions))
    else:
        yield Diagnosis("versions", "ok", here, figures=dict(versions))


def _kernels() -> Iterator[Diagnosis]:
    """Encode and decode once, by a kernel that is compiled now or comes from the cache."""
    values, begun = torch.linspace(-1, 1, 4096), time.perf_counter()
    chosen = codec("dynamic8")
    error = float((chosen.decode(chosen.encode(values), values.numel()) - values).abs().max())
    seconds = time.perf_counter() - begun
    folder = os.environ.get("NUMBA_CACHE_DIR", "beside the package, or in the user's cache folder")
    if error > 0.05:
        text = f"8 bits come back {error:.3g} off"
        yield Diagnosis("kernels", "wrong", text, f"empty Numba's cache ({folder}), and run laconic warm")
        return
    text = f"dynamic8 works, ready in {seconds:.1f} s; compiled kernels are kept {folder}"
    slow = "compile all of them ahead by laconic warm" if seconds > 1 else ""
    yield Diagnosis("kernels", "note" if slow else "ok", text, slow, {"seconds": round(seconds, 3)})


# engines and network


def _exchange() -> list[float]:
    """The mean of 1 and 2, exact and through dynamic8, and the latency and seconds a byte of the way between them."""
    with init(timeout_s=30.0) as world:
        values = torch.full((4096,), float(world.rank + 1))
        exact = float(all_reduce(values.clone(), op="mean")[0])
        coded = float(all_reduce(values, op="mean", codec="dynamic8")[0])
        link = probe(world.transport, quick=True).link
        return [exact, coded, link.latency_s, link.s_per_byte]


def _engines() -> Iterator[Diagnosis]:
    for engine in ("gloo", "zmq", "mpi"):
        try:
            exact, coded, latency_s, s_per_byte = run_job(2, engine, _exchange, (), timeout_s=90.0)
        except MissingExtra as error:
            yield Diagnosis(engine, "note", f"not here: {error}")
            continue
        except LaconicError as error:
            cure = "allow connections on loopback in the firewall; unset GLOO_SOCKET_IFNAME if that interface is gone"
            yield Diagnosis(engine, "note" if engine == "mpi" else "wrong", str(error).splitlines()[0], cure)
            continue
        good = exact == 1.5 and abs(coded - 1.5) < 0.05
        rate_bps = 8 / max(s_per_byte, 1e-12)
        text = f"two processes average 1 and 2 to {exact:g}, through dynamic8 to {coded:.3g}"
        text += f"; between them {1e6 * latency_s:.0f} µs, {rate_bps / 1e9:.1f} Gbit/s"
        yield Diagnosis(engine, "ok" if good else "wrong", text, figures={"latency_s": latency_s, "bps": rate_bps})


def _network() -> Iterator[Diagnosis]:
    name = socket.gethostname()
    interfaces = [_with_speed(each) for _, each in socket.if_nameindex() if each != "lo"]
    known = f"interfaces: {', '.join(interfaces) or 'loopback alone'}"
    cure = "for several machines set GLOO_SOCKET_IFNAME (gloo) or LACONIC_BIND (zmq) to the interface they share"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Diagnosis("network", "note", f"the name of this machine, {name}, has no address; {known}", cure)
        return
    if address.startswith("127."):
        text = f"{name} is {address}, which other machines cannot reach; {known}"
        yield Diagnosis("network", "note", text, cure)
    else:
        yield Diagnosis("network", "ok", f"{name} is {address}; {known}")


def _with_speed(interface: str) -> str:
    """An interface's name, with its speed where the kernel knows it."""
    try:
        mbit = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        return interface
    return f"{interface} ({mbit / 1000:g} Gbit/s)" if mbit > 0 else interface


def _emulated_links() -> Iterator[Diagnosis]:
    try:
        with Cluster(2, "100mbit"):
            pass
    except LaconicError as error:
        yield Diagnosis("emulated links", "note", str(error))
    else:
        yield Diagnosis("emulated links", "ok", "compare, bench step and run can emulate hosts and links here (--link)")


# devices


def device() -> torch.device | None:
    """The accelerator that trainings would use, if any."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _device() -> Iterator[Diagnosis]:
    here = device()
    if here is None:
        yield Diagnosis("device", "note", "no GPU is here: nothing of its path was checked")
        return
    module = torch.get_device_module(here)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else here.type
    yield Diagnosis("device", "ok", f"{torch.accelerator.device_count()} × {name}")
    values = torch.ones(DEVICE_VALUES, device=here)
    rates = {
        kind: _rate(functools.partial(memory.copy_, values, non_blocking=True), values.nbytes)
        for kind, memory in (
            ("another place of the device", torch.empty_like(values)),
            ("pinned memory", torch.empty(DEVICE_VALUES, pin_memory=True)),
            ("pageable memory", torch.empty(DEVICE_VALUES)),
        )
    }
    text = ", ".join(f"to {kind} {rate:.1f} GB/s" for kind, rate in rates.items())
    yield Diagnosis("copies", "ok", text, figures=dict(rates))


def _rate(act: Callable[[], object], nbytes: int) -> float:
    """GB/s at which an action handles these bytes, the best of five."""
    best = math.inf
    for _ in range(5):
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        act()
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begun)
    return nbytes / best / 1e9


def _device_codecs() -> Iterator[Diagnosis]:
    here = device()
    if here is None:
        return
    for spec in DEVICE_CODECS:
        yield compare_codec(spec, here)


def compare_codec(spec: str, here: torch.device, numel: int = DEVICE_VALUES) -> Diagnosis:
    """Encode and decode the same values on a device and on the processor: are the bytes and the results the same?"""
    from laconic.codecs.device import on_device, way

    host = codec(spec)
    there = on_device(host, here)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    on_x, on_residual = x.to(here), residual.to(here)
    memory = torch.empty(host.max_nbytes(numel), dtype=torch.uint8, pin_memory=True)
    expected, found = host.encode_feedback(x, residual), there.encode_feedback(on_x, on_residual, out=memory)
    differing = {
        "bytes": not torch.equal(expected, found),
        "residuals": not torch.equal(residual, on_residual.cpu()),
        "values": not torch.equal(host.decode(expected, numel), there.decode(expected, numel, out=on_x).cpu()),
    }
    wrong = [name for name, differs in differing.items() if differs]
    rate = _rate(lambda: there.encode_feedback(on_x, on_residual, out=memory), 4 * numel)
    by = way(host, here)
    if wrong:
        text = f"{', '.join(wrong)} differ from the processor's (by {by})"
        return Diagnosis(f"codec {spec}", "wrong", text, "report it, with the record", {"way": by})
    text = f"the processor's bytes, residuals and values; encodes {rate:.1f} GB/s by {by}"
    return Diagnosis(f"codec {spec}", "ok", text, figures={"way": by, "GBps": rate})


# trainings


class _Busy(torch.autograd.Function):
    """Passes a weight on; its gradient is `value`, after much other work on the stream of backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.value = value
        return (weight * 0).sum()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        work = torch.ones(512, 512, device=weight.device)
        for _ in range(50):
            work = work @ work / 512
        return torch.zeros_like(weight) + ctx.value * work[0, 0], None


def side_stream_mean(where: str, rank: int) -> float:
    """The mean gradient of two ranks, 1 and 5, whose backward runs on a stream of its own: 3 if nothing is stale."""
    here = torch.device(where)
    weight = nn.Parameter(torch.ones(256, 256, device=here))
    holder = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    job = distribute(holder, optimizer, codec="dynamic8")
    stream = torch.Stream(device=here)
    with stream:
        _Busy.apply(weight, 1.0 + 4 * rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        job.finish()
        found = 1.0 - float(weight.detach().cpu().mean())
    job.close()
    return found


def _side_stream_rank() -> float:
    world = init(timeout_s=60.0)
    here = device()
    assert here is not None
    found = side_stream_mean(f"{here.type}:{world.rank % torch.accelerator.device_count()}", world.rank)
    world.close()
    return found


def _side_stream() -> Iterator[Diagnosis]:
    if device() is None:
        return
    found = run_local(2, _side_stream_rank, timeout_s=120.0)
    good = all(abs(each - 3) < 0.1 for each in found)
    text = f"gradients 1 and 5 made on a stream of their own average to {found[0]:.3g} and {found[1]:.3g}"
    yield Diagnosis("side stream", "ok" if good else "wrong", text)


def _train(way: str, engine: str) -> list[float]:
    """Seconds a step, the first and the last loss, and a digest of the weights, of a small GPT."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    here = device()
    where = torch.device("cpu") if here is None else torch.device(here.type, rank % torch.accelerator.device_count())
    if here is not None:
        torch.accelerator.set_device_index(where.index)
    dist.init_process_group(engine)
    model: nn.Module = CharGPT(32, 32, 2, 64, 2, tied=False).to(where)
    wrapped = model if way == "distribute" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if way == "compress":
        compress(wrapped, "dynamic8")
    job = distribute(model, optimizer, codec="dynamic8") if way == "distribute" else None
    losses, begun = [], 0.0
    for step in range(STEPS):
        if step == STEPS // 2:
            begun = time.perf_counter()
        tokens = (torch.arange(33).repeat(8, 1) * (1 + step % 3) + rank).remainder(32).to(where)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if job is not None:
        job.finish()
    seconds = (time.perf_counter() - begun) / (STEPS - STEPS // 2)
    digest = math.fsum(float(p.detach().double().cpu().sum()) for p in model.parameters())
    if job is not None:
        job.close()
    dist.destroy_process_group()
    return [seconds, losses[0], losses[-1], digest]


def _trainings() -> Iterator[Diagnosis]:
    engines = ["gloo"]
    here = device()
    if here is not None and here.type == "cuda" and torch.accelerator.device_count() > 1 and dist.is_nccl_available():
        engines.append("nccl")
    for engine in engines:
        yield from _trainings_over(engine)


def _trainings_over(engine: str) -> Iterator[Diagnosis]:
    """Train by DDP, then by ours, which must end with equal weights on both ranks and about the same loss."""
    reference = math.inf
    for way in ("DDP", "compress", "distribute"):
        ranks = run_local(2, _train, (way, engine), timeout_s=240.0)
        (seconds, first, last, _), same = ranks[0], ranks[0][3] == ranks[1][3]
        mean = float(np.mean([each[2] for each in ranks]))
        if way == "DDP":
            reference = mean
        learns = last < 0.9 * first and mean < 1.2 * reference + 0.1
        text = f"{STEPS} steps of a small GPT on two ranks over {engine}: loss {first:.2f} to {last:.2f}"
        text += f", {1e3 * seconds:.0f} ms a step, weights {'equal' if same else 'UNEQUAL'}"
        verdict: Verdict = "ok" if learns and same else "wrong"
        cure = "" if verdict == "ok" else "report it, with the record"
        yield Diagnosis(f"training by {way}", verdict, text, cure, {"seconds": seconds, "loss": last})


CHECKS: dict[str, Check] = {
    "versions": _versions,
    "kernels": _kernels,
    "engines": _engines,
    "network": _network,
    "emulated links": _emulated_links,
    "device": _device,
    "device codecs": _device_codecs,
    "side stream": _side_stream,
    "trainings": _trainings,
}
