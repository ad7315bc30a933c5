"""Compile every kernel ahead, so that no training waits for it: for images of machines, and before a measurement.

Caller: `laconic warm`. A kernel is compiled for the types it is called with, so each is called as its users do, on a
few values. Applications of the library add functions that call theirs by entry points of the group `laconic.kernels`.
What is compiled stays in Numba's cache, see `kernels.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import numpy as np
import torch

from laconic import codecs, operators
from laconic.codecs.compiling import compile_kernels, use
from laconic.codecs.powersgd import PowerSGD
from laconic.consistency.robust import rules
from laconic.exchange.dgc import accelerate
from laconic.exchange.sparse import sparse_all_reduce
from laconic.exchange.sparse_stream import SparseStream
from laconic.schedules import ring
from laconic.schedules.link import Link
from laconic.shrinking.coder import chunks, exact
from laconic.transports.base import Transport
from laconic.transports.loggp import simulate
from laconic.transports.threads import run_threads

_SPARSE = ("ssar_recursive_doubling", "ssar_split_allgather", "dsar")


def compile_all() -> Iterator[str]:
    """Compile every kernel of the package; yields the name of each group when it is done."""
    for spec in _specs():
        compile_kernels(codecs.codec(spec))
        yield spec
    for value in (0.0, 1.0):  # a sample does not tell the largest from the rest
        use(codecs.codec("topk(0.01)"), torch.full((200_000,), value))
    yield "topk of equal values"
    PowerSGD().start((4, 3))
    yield "powersgd"
    rows = np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32)
    for name in rules.RULES:
        rules.aggregate(name, rows, 1)
        yield name
    accelerate(torch.zeros(5), torch.ones(5), 0.9, 1.0, nesterov=False)
    yield "momentum correction"
    for algorithm in _SPARSE:
        run_threads(2, lambda transport, algorithm=algorithm: _add_sparse(transport, algorithm))  # type: ignore[misc]
        yield algorithm
    for method in operators.names():
        for kernel in (3, 5):
            weight = torch.zeros(1, 1, kernel, kernel, requires_grad=True)
            torch.autograd.grad(operators.convolve(torch.zeros(1, 1, 8, 8), weight, method=method).sum(), weight)
        yield method
    for layer in (operators.LSTM(1, 1), operators.GRU(1, 1)):
        layer(torch.zeros(2, 1, 1))[0].sum().backward()
        yield type(layer).__name__
    for dtype in (torch.float32, torch.uint8):
        exact.decode(*exact.encode(torch.zeros(200, dtype=dtype)), torch.empty(200, dtype=dtype))
    symbols = np.zeros((4, 4), np.uint8)
    chunks.decode(chunks.encode(symbols, 3), symbols, 3)
    yield "coder of shrunk models"
    simulate(ring(2, 4), Link(latency_s=1e-6, s_per_byte=1e-9))
    yield "simulator"
    for entry in entry_points(group="laconic.kernels"):
        entry.load()()
        yield entry.name


def _specs() -> list[str]:
    """The examples of every registered codec of vectors, alone and composed."""
    vectors = [name for name in codecs.names() if codecs.get(name).kind != "matrix"]
    specs = [spec for name in vectors for spec in getattr(codecs.get(name), "examples", ()) or (name,)]
    quantisers = [name for name in vectors if codecs.get(name).kind == "quantiser"]
    return [*specs, *(f"topk(0.05)+{name}" for name in quantisers), "dynamic8+entropy", "topk(0.05)+qsgd(4)+entropy"]


def _add_sparse(transport: Transport, algorithm: str) -> None:
    sparse_all_reduce(SparseStream.of([transport.rank, 5], [1.0, 10.0], 8), transport, algorithm).to_dense()
