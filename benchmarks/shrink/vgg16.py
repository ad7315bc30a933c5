"""VGG-16 at the densities of Deep Compression, drawn and not trained: its file, and how quickly that is read.

Caller: `shrink.py`. Loading is measured in a process of its own (`python -m benchmarks.shrink.loading`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shrink.deep_compression import PAPER
from laconic.kernels import Array
from laconic.shrinking import file
from laconic.shrinking.coder import chunks
from laconic.shrinking.parts import Part, Shared, half, uniform
from laconic.workloads import models

ROOT = Path(__file__).parents[2]
_MOST = 0.98  # the highest chance to be kept


def drawn(spread: bool = True, scale: float = 1.0) -> dict[str, Part]:
    """VGG-16 with the published share of each weight kept, drawn; biases are normal, in 8 bits.

    Args:
        spread: rows and columns differ in how much of them is kept, so that places cost Huffman-coded gaps about
            what the paper's table says; False keeps places at random, of which no coder can make anything.
        scale: the share of rows that is made, for a quick look.
    """
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in models.build("vgg16").state_dict().items()}
    layers = iter(PAPER["vgg16"].layers)
    parts: dict[str, Part] = {}
    for place, (name, shape) in enumerate(shapes.items()):
        rng = np.random.default_rng(place)
        if len(shape) == 1:
            parts[name] = uniform(torch.from_numpy(rng.normal(size=shape).astype(np.float32)), 8)
            continue
        layer = next(layers)
        shape = (max(1, round(shape[0] * scale)), *shape[1:])
        rows, columns = chunks.matrix_shape(shape)
        share = np.full((rows, columns), layer.kept / 100, np.float32)
        if spread:
            share = _spread(rng, rows, columns, layer.kept / 100, layer.index_bits)
        mask = rng.random((rows, columns), np.float32) < share
        odds = _geometric(layer.weight_bits, 255 if len(shape) > 2 else 32)
        symbols = np.zeros((rows, columns), np.uint8)
        symbols[mask] = rng.choice(len(odds), int(mask.sum()), p=odds) + 1
        values = half((np.arange(len(odds), dtype=np.float32) - len(odds) / 2 + 0.25) / 1000)  # none is zero
        parts[name] = Shared(symbols.reshape(shape), np.concatenate([np.zeros(1, np.float32), values]))
    return parts


def written(parts: dict[str, Part], path: Path) -> dict[str, Any]:
    """Write the file; its bytes and the seconds it took."""
    start = time.perf_counter()
    nbytes = file.write(path, parts)
    return {"file_nbytes": nbytes, "encode_s": time.perf_counter() - start, "threads": torch.get_num_threads()}


def loaded(path: Path, threads: int) -> Iterator[dict[str, Any]]:
    """Seconds and peak of memory of loading the file into VGG-16, dense and sparse, each in a process of its own."""
    for sparse in ("never", "always"):
        words = [str(path.absolute()), "vgg16", sparse, str(threads)]
        command = [sys.executable, "-m", "benchmarks.shrink.loading", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
        yield json.loads(done.stdout)


def _spread(rng: np.random.Generator, rows: int, columns: int, kept: float, bits: float) -> Array:
    """Chances to be kept with log-normal factors of rows and columns, so wide that a place costs `bits`."""
    by_row, by_column = rng.normal(size=(rows, 1)).astype(np.float32), rng.normal(size=(1, columns)).astype(np.float32)
    low, high = 0.0, 4.0
    few = by_row[:: max(1, rows // 256)] + by_column[:, :: max(1, columns // 1024)]  # enough to find width and scale
    for _ in range(8):
        width = (low + high) / 2
        part = np.minimum(_scale(few, width, kept) * np.exp(width * few), _MOST)
        cost = float(_entropy(part).mean()) / kept
        low, high = (width, high) if cost > bits else (low, width)
    width = (low + high) / 2
    chances: Array = np.exp(width * by_row) * np.exp(width * by_column)
    chances *= np.float32(_scale(few, width, kept))
    for _ in range(4):  # the scale is that of a few rows and columns; the mean is to be that of all
        np.minimum(chances, _MOST, out=chances)
        chances *= np.float32(kept / float(chances.mean(dtype=np.float64)))
    return np.minimum(chances, _MOST, out=chances)


def _scale(factors: Array, width: float, kept: float) -> float:
    """The c for which min(1, c · exp(width · factors)) has a mean of `kept`."""
    weights = np.exp(width * factors)
    c = kept / float(weights.mean())
    for _ in range(20):
        c *= kept / float(np.minimum(c * weights, _MOST).mean())
    return c


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
