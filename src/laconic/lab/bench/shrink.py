"""How small networks ship, how quickly they are coded, and how quickly they run: beside Deep Compression and peers.

Caller: `laconic bench shrink`. Sizes are those of whole files. A network is trained, pruned in rounds to each of its
goals in turn, its values are shared and tuned, and the file that is written is loaded again and judged.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.errors import UnknownName
from laconic.kernels import Array
from laconic.lab.environment import environment
from laconic.operators.timing import race
from laconic.shrink import prune
from laconic.shrink.coder import chunks, exact, han
from laconic.shrink.door import Shrunk, load_shrunk
from laconic.shrink.plan import Plan
from laconic.shrink.report import Report
from laconic.shrink.running import SparseChain
from laconic.shrink.share import build, share
from laconic.shrink.training import TaskTraining, error_of
from laconic.workloads import Task, get, models
from laconic.workloads.inputs import Pixels, ShiftedPixels

Say = Callable[[str], None]


@dataclass(frozen=True)
class Goal:
    """One file to make: the density over all weights, the bits of values and of biases."""

    density: float
    bits: int
    small_bits: int = 6


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        workload: what is trained.
        epochs: of the first training.
        rounds: of pruning, before each goal.
        retraining: epochs of each round and of tuning values.
        rate: that a retraining starts with, over the workload's.
        goals: from the largest file to the smallest; each goes on from the one before.
        paper: what Deep Compression published: kept % by layer, reduction factor, error.
        shifts: pixels by which images are shifted in training, dense or pruned; 0 leaves the workload's inputs.
    """

    workload: str
    epochs: int
    rounds: int
    retraining: int
    rate: float
    goals: tuple[Goal, ...]
    paper: str
    shifts: int = 0

    def prepared(self, seed: int) -> Task:
        """The workload with its model and data."""
        workload = get(self.workload)
        if self.shifts:
            workload = replace(workload, inputs=ShiftedPixels(Pixels(), 28, self.shifts, mirrored=False))
        return workload.prepare(seed)


NETWORKS = {
    "lenet-300-100": Network(
        "mnist-300-100", 20, 3, 6, 0.5, (Goal(0.07, 4), Goal(0.042, 3), Goal(0.033, 3)),
        "kept 8, 9, 26 %: 40× at 1.58 % (1.64 % dense)", shifts=1,
    ),
    "lenet-5": Network(
        "mnist-lenet", 8, 3, 4, 0.4, (Goal(0.05, 4), Goal(0.02, 3), Goal(0.012, 3)),
        "kept 66, 12, 8, 19 %: 39× at 0.74 % (0.80 % dense)", shifts=1,
    ),
    "cifar-resnet-20": Network("cifar-resnet(20)", 30, 3, 6, 0.2, (Goal(0.25, 4), Goal(0.1, 4)), ""),
    "digits-mlp": Network("digits-mlp", 10, 2, 4, 0.5, (Goal(0.15, 4), Goal(0.08, 3)), ""),
}  # fmt: skip

# Han, Mao, Dally, Deep Compression, ICLR 2016, Table 5: the share kept of each weight of VGG-16, in order; and, after
# Huffman coding, the bits of a value and of its place.
VGG16 = tuple(zip(
    (58, 22, 34, 36, 53, 24, 42, 32, 27, 34, 35, 29, 36, 4, 4, 23),
    (6.8, 6.5, 5.6, 5.9, 4.8, 4.6, 4.6, 4.6, 4.2, 4.4, 4.7, 4.6, 4.6, 3.6, 4.0, 4.0),
    (1.7, 2.6, 2.4, 2.3, 1.8, 2.9, 2.2, 2.6, 2.9, 2.5, 2.5, 2.7, 2.3, 3.5, 4.3, 3.4), strict=True,
))  # fmt: skip


def train_and_shrink(name: str, seed: int, say: Say) -> Iterator[tuple[dict[str, Any], Report]]:
    """A row and a table for each goal of a network."""
    if name not in NETWORKS:
        raise UnknownName("network of the benchmark", name, NETWORKS)
    network = NETWORKS[name]
    task = network.prepared(seed)
    judge = error_of(task)
    TaskTraining(task, network.epochs, rate=1.0)(task.model)
    dense_error, dense_wrong = judge(task.model), _wrong(task, task.model)
    say(f"{name}, seed {seed}: dense error {100 * dense_error:.2f} %")
    train, model, before = TaskTraining(task, network.retraining, network.rate), task.model, 1.0
    for goal in network.goals:
        masks: dict[str, Tensor] = {}
        for turn in range(1, network.rounds + 1):
            density = goal.density * (before / goal.density) ** (1 - turn / network.rounds)
            masks = Plan(density=density, rounds=1).prune(model, train)
        before, small = goal.density, deepcopy(model)
        plan = Plan(bits=goal.bits, small_bits=goal.small_bits)
        shrunk = Shrunk(small, plan.share_values(small, masks, train), plan)
        with tempfile.TemporaryDirectory() as folder:
            nbytes = shrunk.save(Path(folder) / "a.lac")
            loaded = load_shrunk(Path(folder) / "a.lac", into=get(network.workload).build(seed), sparse="never")
        report, wrong = shrunk.report(), _wrong(task, loaded)
        row: dict[str, Any] = {
            "network": name, "seed": seed, "dense_error": dense_error, "shrunk_error": judge(loaded),
            "dense_nbytes": report.dense_nbytes, "file_nbytes": nbytes, "ratio": report.reduction_factor,
            "density": report.density, "bits": goal.bits, "newly_wrong": int((wrong & ~dense_wrong).sum()),
            "newly_right": int((dense_wrong & ~wrong).sum()), "paper": network.paper,
        }  # fmt: skip
        say(f"{name}, seed {seed}: {row['ratio']:.1f}× at {100 * row['shrunk_error']:.2f} %, {nbytes:,} bytes")
        yield row, report


@torch.no_grad()
def _wrong(task: Task, model: nn.Module) -> Tensor:
    """For each test sample whether the model is wrong about it."""
    model.eval()
    samples, found = task.data.test, []
    for start in range(0, len(samples), 500):
        numbers = torch.arange(start, min(start + 500, len(samples)))
        output = model(task.workload.inputs(samples.x[numbers]))
        found.append(output.argmax(1) != samples.y[numbers])
    return torch.cat(found)


def coders(parts: dict[str, tuple[Array, int]], repeats: int = 3) -> list[dict[str, Any]]:
    """Each coder over the same matrices of symbols: bytes, and millions of symbols a second both ways."""
    total = sum(symbols.size for symbols, _ in parts.values())
    rows = []
    for coder, (encode, decode) in _coders().items():
        nbytes, times = 0, {"encode": 0.0, "decode": 0.0}
        for symbols, levels in parts.values():
            coded, seconds = _timed(partial(encode, symbols, levels), repeats)
            times["encode"] += seconds
            back, seconds = _timed(partial(decode, coded, symbols.shape, levels), repeats)
            times["decode"] += seconds
            if not np.array_equal(back, symbols):
                raise AssertionError(f"{coder} does not give back what it was given")
            nbytes += len(coded) if isinstance(coded, bytes) else sum(map(len, coded))
        speeds = {f"{key}_msym_s": total / max(value, 1e-9) / 1e6 for key, value in times.items()}
        rows.append({"coder": coder, "nbytes": nbytes, "symbols": total, "threads": torch.get_num_threads(), **speeds})
    return rows


def lossless(state: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A state_dict to the bit: our coder's bytes beside zstd's, and millions of values a second both ways."""
    values = sum(tensor.numel() for tensor in state.values())
    coded, encoding = _timed(lambda: [exact.encode(tensor) for tensor in state.values()], 1)
    pairs = list(zip(coded, state.values(), strict=True))
    back, decoding = _timed(lambda: [exact.decode(p, n, torch.empty_like(tensor)) for (p, n), tensor in pairs], 1)
    if not all(map(torch.equal, back, state.values())):
        raise AssertionError("exact coding does not give back what it was given")
    nbytes = sum(len(piece) for pieces, _ in coded for piece in pieces)
    rows = [{"coder": "laconic exact", "nbytes": nbytes, "encode_msym_s": values / encoding / 1e6,
             "decode_msym_s": values / decoding / 1e6, "symbols": values}]  # fmt: skip
    try:
        import zstandard
    except ImportError:
        return rows
    raw = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    packed, encoding = _timed(lambda: zstandard.ZstdCompressor(19).compress(raw), 1)
    _, decoding = _timed(lambda: zstandard.ZstdDecompressor().decompress(packed), 1)
    rows.append({"coder": "zstd-19", "nbytes": len(packed), "encode_msym_s": values / encoding / 1e6,
                 "decode_msym_s": values / decoding / 1e6, "symbols": values})  # fmt: skip
    return rows


def _coders() -> dict[str, tuple[Callable[[Array, int], Any], Callable[[Any, tuple[int, int], int], Array]]]:
    def ours(coded: list[bytes], shape: tuple[int, int], levels: int) -> Array:
        out = np.empty(shape, np.uint8)
        chunks.decode(coded, out, levels)
        return out

    found: dict[str, Any] = {
        "laconic": (chunks.encode, ours),
        "han": (han.encode, lambda coded, shape, levels: han.decode(coded, shape[0] * shape[1], levels).reshape(shape)),
    }
    try:
        import zstandard
    except ImportError:
        return found
    found["zstd-19"] = (
        lambda symbols, levels: zstandard.ZstdCompressor(19).compress(symbols.tobytes()),
        lambda coded, shape, levels: np.frombuffer(
            zstandard.ZstdDecompressor().decompress(coded), np.uint8
        ).reshape(shape),
    )
    return found


def _timed(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """What a function returns, and its median time; this thread's where it works alone."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds, found = [], None
    for _ in range(repeats):
        start = clock()
        found = function()
        seconds.append(clock() - start)
    return found, statistics.median(seconds)


def vgg16_symbols(spread: bool = True, scale: float = 1.0) -> Iterator[tuple[str, Array, int]]:
    """Symbols of VGG-16 at the published densities: drawn, not trained.

    Args:
        spread: rows and columns differ in how much of them is kept, so that places cost Huffman-coded gaps about
            what the paper's table says; False keeps places at random, of which no coder can make anything.
        scale: the share of rows that is made, for a quick look.
    """
    with torch.device("meta"):
        shapes = [(name, tuple(w.shape)) for name, w in prune.weights(models.build("vgg16")).items()]
    for place, ((name, shape), (kept, value_bits, place_bits)) in enumerate(zip(shapes, VGG16, strict=True)):
        rng = np.random.default_rng(place)
        rows, columns = chunks.matrix_shape(shape)
        rows = max(1, round(rows * scale))
        share = np.full((rows, columns), kept / 100, np.float32)
        if spread:
            share = _spread(rng, rows, columns, kept / 100, place_bits)
        mask = rng.random((rows, columns), np.float32) < share
        odds = _geometric(value_bits, 255 if len(shape) > 2 else 32)
        symbols = np.zeros((rows, columns), np.uint8)
        symbols[mask] = rng.choice(len(odds), int(mask.sum()), p=odds) + 1
        yield name, symbols, len(odds)


def _spread(rng: np.random.Generator, rows: int, columns: int, kept: float, bits: float) -> Array:
    """Chances to be kept with log-normal factors of rows and columns, so wide that a place costs `bits`."""
    by_row, by_column = rng.normal(size=(rows, 1)).astype(np.float32), rng.normal(size=(1, columns)).astype(np.float32)
    low, high = 0.0, 4.0
    few = slice(None, None, max(1, rows // 256)), slice(None, None, max(1, columns // 1024))
    for _ in range(8):
        width = (low + high) / 2
        part = _chances(by_row[few[0]] + by_column[:, few[1]], width, kept)
        cost = float(_entropy(part).mean()) / kept
        low, high = (width, high) if cost > bits else (low, width)
    return _chances(by_row + by_column, (low + high) / 2, kept)


def _chances(factors: Array, width: float, kept: float) -> Array:
    """min(1, c · exp(width · factors)) with a mean of `kept`."""
    weights = np.exp(width * factors)
    c = kept / weights.mean()
    for _ in range(20):
        c *= kept / np.minimum(c * weights, 0.98).mean()
    chances: Array = np.minimum(c * weights, 0.98)
    return chances


def _entropy(p: Array) -> Array:
    found: Array = -(p * np.log2(np.maximum(p, 1e-12)) + (1 - p) * np.log2(np.maximum(1 - p, 1e-12)))
    return found


def _geometric(bits: float, values: int) -> Array:
    """Odds of two-sided geometric values whose entropy is `bits`."""
    distance = np.abs(np.arange(values) - (values - 1) / 2)
    low, high, odds = 1e-4, 5.0, np.empty(0)
    for _ in range(40):
        rate = (low + high) / 2
        odds = np.exp(-rate * distance)
        odds /= odds.sum()
        low, high = (rate, high) if -(odds * np.log2(np.maximum(odds, 1e-300))).sum() > bits else (low, rate)
    return odds


def running(density: float = 0.05, turns: int = 21) -> Iterator[dict[str, Any]]:
    """A fully connected layer with few weights beside torch's dense one and its sparse `F.linear`."""
    for size in (1024, 4096):
        layer = nn.Linear(size, size)
        mask = prune.magnitude({"w": layer.weight}, density, scope="layer")["w"]
        layer.weight.data.mul_(mask)
        chain, csr = SparseChain([layer]), layer.weight.detach().to_sparse_csr()
        for batch in (1, 64):
            x = torch.randn(batch, size)
            ways: dict[str, Callable[[], object]] = {
                "dense": partial(layer, x), "laconic": partial(chain, x),
                "torch.sparse": partial(nn.functional.linear, x, csr, layer.bias),
            }  # fmt: skip
            with torch.no_grad():
                timed = race(ways, turns, 10.0, float("inf"))
            speeds = {f"{name}_ms": 1e3 * each.seconds for name, each in timed.items()}
            yield {"size": size, "batch": batch, "density": density, "speedup": timed["laconic"].speedup, **speeds}


def symbols_of(model: nn.Module, density: float, bits: int) -> dict[str, tuple[Array, int]]:
    """A model's weights pruned and shared, as matrices of symbols."""
    masks = prune.magnitude(prune.weights(model), density)
    found = {name: share(w, build("kmeans", bits), masks[name]) for name, w in prune.weights(model).items()}
    return {name: (p.symbols.reshape(chunks.matrix_shape(p.symbols.shape)), p.levels) for name, p in found.items()}


def record(results: list[dict[str, Any]], coded: list[dict[str, Any]], ran: list[dict[str, Any]]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"environment": environment(), "results": results, "coders": coded, "running": ran}
