"""Device mapping: on which device, CPU or GPU, an OpenCL kernel runs faster; 680 measured rows for each of two GPUs.

Caller: `laconic code map`, `laconic bench code`. Folds are the paper's (ten, stratified) or grouped by kernel: with the
paper's, four of five test rows have a sibling of the same kernel, on another input, in training. Speed-up is the mean
of the run time on the better single device over that on the device predicted.

Source: Cummins et al., End-to-end Deep Learning of Optimization Heuristics, PACT 2017; Neural Code Comprehension, §6.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from laconic.comprehension import archives
from laconic.comprehension.graph import FlowGraph, build
from laconic.comprehension.ir import read_text
from laconic.comprehension.programs import TREES, Matrix, cross_predict, mean_vectors, ways
from laconic.errors import BadInput, UnknownName

PLATFORMS = ("amd", "nvidia")
FOLDS = {"paper": "legacy_fold", "grouped": "group_fold"}
PUBLISHED = {"amd": {"accuracy": 0.8279, "speedup": 3.42}, "nvidia": {"accuracy": 0.8176, "speedup": 1.39}}
_STATIC = {"amd": "runtime_cpu", "nvidia": "runtime_gpu"}  # the better single device over all rows
_COUNTS = ("comp", "rational", "mem", "localmem", "coalesced", "atomic", "transfer", "wgsize")
_AUXILIARY = ("transfer", "wgsize")
Tell = Callable[[str], None]


def run(
    platforms: Sequence[str] = PLATFORMS, seed: int = 204, trees: int = TREES, tell: Tell = lambda line: None
) -> list[dict[str, Any]]:
    """Accuracy and speed-up of every way on both kinds of folds, for each platform."""
    for name in platforms:
        if name not in PLATFORMS:
            raise UnknownName("platform", name, PLATFORMS)
    graphs, skipped = read_kernels("Device_Mapping", tell)
    shown = archives.document("ncc-eval", "enc_devmap.json")
    results: list[dict[str, Any]] = []
    programs: dict[str, Matrix] | None = None
    for platform in platforms:
        rows = archives.table("cgo17", f"cgo17-{platform}.csv")
        names = [kernel_name(row) for row in rows]
        if programs is None:
            programs = _programs(names, graphs, shown, seed)
        folds = archives.document("cgo17", "folds_seed204.json")[platform]
        for method, features in _methods(rows, programs).items():
            for kind, key in FOLDS.items():
                found = _measured(rows, features, np.array(folds[key]), seed, trees, platform)
                results.append({"task": "device mapping", "platform": platform, "method": method, "folds": kind,
                                **found, "published": PUBLISHED[platform], "skipped": skipped})  # fmt: skip
                tell(f"{platform} {method}, {kind} folds: {100 * found['accuracy']:.2f} %, {found['speedup']:.2f} ×")
    return results


def kernel_name(row: dict[str, str]) -> str:
    """The name of a row's IR file; NPB's kernels are compiled for each size of input."""
    return f"{row['benchmark']}_{row['dataset']}" if row["benchmark"].startswith("npb") else row["benchmark"]


def read_kernels(task: str, tell: Tell) -> tuple[dict[str, FlowGraph], int]:
    """The graphs of a task's kernels, and how many LLVM could not read: those are read as plain text."""
    found, unread = {}, 0
    for name, text in archives.kernels(task).items():
        try:
            found[name] = build(read_text(text, name), name)
        except BadInput as error:
            unread += 1
            tell(f"{error}; read without LLVM")
            found[name] = build(text, name)
    return found, unread


def _programs(
    names: Sequence[str], graphs: dict[str, FlowGraph], shown: dict[str, list[int]], seed: int
) -> dict[str, Matrix]:
    """Each row's program by every way, ours and the published embedding."""
    order = list(dict.fromkeys(names))
    place = np.array([order.index(name) for name in names])
    found = ways([graphs[name] for name in order], seed)
    sequences = [np.array(shown[name]) for name in order]
    found["published embedding"] = mean_vectors(sequences, archives.published().vectors)
    return {way: features[place] for way, features in found.items()}


def _methods(rows: Sequence[dict[str, str]], programs: dict[str, Matrix]) -> dict[str, Matrix]:
    auxiliary, counts = (np.array([[float(row[c]) for c in names] for row in rows]) for names in (_AUXILIARY, _COUNTS))
    found = {f"{way} + auxiliary": np.hstack([features, auxiliary]) for way, features in programs.items()}
    found["embedding + raw counts"] = np.hstack([programs["embedding"], counts])
    return found | {"raw counts": counts, "auxiliary alone": auxiliary}


def _measured(
    rows: Sequence[dict[str, str]], features: Matrix, folds: Any, seed: int, trees: int, platform: str
) -> dict[str, float]:
    cpu, gpu = (np.array([float(row[f"runtime_{device}"]) for row in rows]) for device in ("cpu", "gpu"))
    oracle = (gpu < cpu).astype(np.int64)
    predicted = cross_predict(features, oracle, folds, seed, trees)
    static = cpu if _STATIC[platform] == "runtime_cpu" else gpu
    taken = np.where(predicted == 1, gpu, cpu)
    return {
        "accuracy": float((predicted == oracle).mean()), "speedup": float((static / taken).mean()),
        "oracle_speedup": float((static / np.minimum(cpu, gpu)).mean()),
    }  # fmt: skip
