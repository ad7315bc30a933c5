"""Thread coarsening: by which factor (1 … 32) to merge the threads of an OpenCL kernel; 17 kernels on four GPUs.

Callers: `laconic code coarsen`, `laconic bench code`. Each kernel is predicted from the sixteen others. A forest
estimates the logarithm of the speed-up that each factor gives to a program, and the factor whose lower quartile over
the trees is best is taken. A factor that was not measured for the kernel falls to the largest one that was. Speed-up is
the mean over kernels. Seventeen kernels decide little: the constant factor is always shown beside.

Source: Magni et al., PACT 2014; Neural Code Comprehension, NeurIPS 2018, §6.3. Differs: the paper classifies factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from laconic.comprehension import archives
from laconic.comprehension.device_mapping import read_kernels
from laconic.comprehension.programs import TREES, Matrix, mean_vectors, ways
from laconic.errors import UnknownName

PUBLISHED = {"Cypress": 1.25, "Tahiti": 1.07, "Fermi": 1.02, "Kepler": 1.03}
FACTORS = (1, 2, 4, 8, 16, 32)
_NUMBERS = tuple(f"PCA{n}" for n in range(1, 8))
CAUTION = 0.25  # the share of trees that may expect less than the estimate; factor 1 is certain to give 1
Times = dict[str, dict[int, float]]


def run(
    platforms: Sequence[str] = tuple(PUBLISHED), seed: int = 204, trees: int = TREES,
    tell: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Speed-up of every way on each platform, leaving one kernel out."""
    for name in platforms:
        if name not in PUBLISHED:
            raise UnknownName("platform", name, PUBLISHED)
    graphs, skipped = read_kernels("Thread_Coarsening", tell)
    table = archives.table("cgo17", "pact-2014-runtimes.csv")
    kernels = sorted(dict.fromkeys(row["kernel"] for row in table))
    programs = ways([graphs[name] for name in kernels], seed)
    shown = archives.document("ncc-eval", "enc_tc.json")
    programs["published embedding"] = mean_vectors([np.array(shown[k]) for k in kernels], archives.published().vectors)
    first = {row["kernel"]: row for row in table if row["cf"] == "1"}
    programs["measured numbers alone"] = np.array([[float(first[k][c]) for c in _NUMBERS] for k in kernels])
    results = []
    for platform in platforms:
        times = {k: _times(table, k, platform) for k in kernels}
        chosen = {"constant factor": _constant(kernels, times)}
        chosen |= {way: _estimated(features, kernels, times, seed, trees) for way, features in programs.items()}
        oracle = float(np.mean([times[k][1] / min(times[k].values()) for k in kernels]))
        for method, factors in chosen.items():
            gains = [times[k][1] / times[k][_measured(f, times[k])] for k, f in zip(kernels, factors, strict=True)]
            hits = [times[k][_measured(f, times[k])] == min(times[k].values())
                    for k, f in zip(kernels, factors, strict=True)]  # fmt: skip
            results.append({"task": "thread coarsening", "platform": platform, "method": method,
                            "folds": "leave one out", "accuracy": float(np.mean(hits)),
                            "speedup": float(np.mean(gains)), "oracle_speedup": oracle,
                            "published": {"speedup": PUBLISHED[platform]}, "skipped": skipped})  # fmt: skip
            tell(f"{platform} {method}: {results[-1]['speedup']:.3f} × (published {PUBLISHED[platform]})")
    return results


def _times(table: Sequence[dict[str, str]], kernel: str, platform: str) -> dict[int, float]:
    """Run times by factor, of the factors that were measured."""
    rows = (row for row in table if row["kernel"] == kernel)
    found = {int(row["cf"]): row[f"runtime_{platform}"] for row in rows}
    return {factor: float(value) for factor, value in found.items() if value and float(value) > 0}


def _measured(factor: int, times: dict[int, float]) -> int:
    return factor if factor in times else max(each for each in times if each <= factor)


def _gains(times: dict[int, float]) -> list[float]:
    return [float(np.log(times[1] / times[_measured(factor, times)])) for factor in FACTORS]


def _constant(kernels: Sequence[str], times: Times) -> list[int]:
    """The control without programs: the factor with the best mean over the other kernels."""
    gains = np.array([_gains(times[k]) for k in kernels])
    return [FACTORS[int(np.delete(gains, n, axis=0).mean(axis=0).argmax())] for n in range(len(kernels))]


def _estimated(features: Matrix, kernels: Sequence[str], times: Times, seed: int, trees: int) -> list[int]:
    from sklearn.ensemble import ExtraTreesRegressor

    gains = np.array([_gains(times[k]) for k in kernels])
    chosen = []
    for n in range(len(kernels)):
        model = ExtraTreesRegressor(trees, max_features=0.3, random_state=seed, n_jobs=1)
        model.fit(np.delete(features, n, axis=0), np.delete(gains, n, axis=0))
        estimates = np.stack([tree.predict(features[n : n + 1])[0] for tree in model.estimators_])
        chosen.append(FACTORS[int(np.quantile(estimates, CAUTION, axis=0).argmax())])
    return chosen
