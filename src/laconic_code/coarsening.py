"""Thread coarsening: by which factor (1 … 32) to merge the threads of an OpenCL kernel; 17 kernels on four GPUs.

Callers: `laconic code coarsen`, its benchmark. Each kernel is predicted from the sixteen others: the gain of a
factor is estimated as its mean gain over the kernels most like this one, and the factor with the best estimate is
taken. How many neighbours, gains or their logarithms, and how much the same kernels' gains on the other GPUs count, is
chosen by leaving one out among the sixteen; with all sixteen as neighbours it is a constant factor. A cautious choice
takes the rule that averages most, unless the best one is better by more than the standard error of the difference. A
factor that was not measured for the kernel falls to the largest one that was. Speed-up is the mean over kernels.
Seventeen kernels decide little: constant factors are always shown beside.

Source: Magni et al., PACT 2014; Neural Code Comprehension, NeurIPS 2018, §6.3. Differs: the paper classifies factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from laconic.errors import UnknownName
from laconic_code import archives
from laconic_code.device_mapping import read_kernels
from laconic_code.programs import Matrix, dense, ways

PUBLISHED = {"Cypress": 1.25, "Tahiti": 1.07, "Fermi": 1.02, "Kepler": 1.03}
FACTORS = (1, 2, 4, 8, 16, 32)
_NUMBERS = tuple(f"PCA{n}" for n in range(1, 8))
Times = dict[str, dict[int, float]]


@dataclass(frozen=True)
class CoarseningRule:
    """How gains are estimated.

    Args:
        neighbours: kernels whose gains are averaged.
        others: weight of the mean over all GPUs, beside that of the GPU at hand.
        is_log: average logarithms of gains.
    """

    neighbours: int
    others: float
    is_log: bool


# The cautious ones first.
RULES = tuple(CoarseningRule(*each) for each in product((16, 8, 5, 3, 2, 1), (1.0, 0.5, 0.0), (False, True)))
CONSTANTS = {
    "constant factor": CoarseningRule(16, 0.0, False),
    "constant factor of all GPUs": CoarseningRule(16, 1.0, False),
}


def run(
    platforms: Sequence[str] = tuple(PUBLISHED), seed: int = 204, tell: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Speed-up of every way on each platform, leaving one kernel out."""
    for name in platforms:
        if name not in PUBLISHED:
            raise UnknownName("platform", name, PUBLISHED)
    graphs, skipped = read_kernels("Thread_Coarsening", tell)
    table = archives.table("cgo17", "pact-2014-runtimes.csv")
    kernels = sorted(dict.fromkeys(row["kernel"] for row in table))
    found = ways([graphs[name] for name in kernels], seed)
    shown = [np.array(archives.document("ncc-eval", "enc_tc.json")[kernel]) for kernel in kernels]
    found.add_published(shown, archives.published())
    first = {row["kernel"]: row for row in table if row["cf"] == "1"}
    found.features["measured numbers alone"] = np.array([[float(first[k][c]) for c in _NUMBERS] for k in kernels])
    gains = np.array([[_gains(_times(table, k, gpu)) for k in kernels] for gpu in PUBLISHED])
    chosen = {method: leave_one_out(np.zeros((len(kernels), 1)), gains, [rule]) for method, rule in CONSTANTS.items()}
    for way, features in found.features.items():
        chosen[way] = leave_one_out(dense(features), gains, RULES)
        chosen[f"{way}, cautious"] = leave_one_out(dense(features), gains, RULES, is_cautious=True)
    results = []
    for platform, (method, factors) in product(platforms, chosen.items()):
        number = list(PUBLISHED).index(platform)
        got = np.take_along_axis(gains[number], factors[number][:, None], axis=1)[:, 0]
        best, way = gains[number].max(axis=1), method.removesuffix(", cautious")
        results.append({"task": "thread coarsening", "platform": platform, "method": method, "folds": "leave one out",
                        "accuracy": float((got == best).mean()), "speedup": float(got.mean()),
                        "oracle_speedup": float(best.mean()), "published": {"speedup": PUBLISHED[platform]},
                        "unknown_share": found.unknown.get(way), "skipped": skipped})  # fmt: skip
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
    return [times[1] / times[_measured(factor, times)] for factor in FACTORS]


def leave_one_out(
    features: Matrix, gains: Matrix, rules: Sequence[CoarseningRule], is_cautious: bool = False
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The factor for each GPU and kernel, by the rule that is best for the other kernels.

    Args:
        features: a row a kernel.
        gains: by GPU, kernel and factor.
        is_cautious: by the first rule than which the best one is not better by a standard error.

    Returns:
        Places in FACTORS, by GPU and kernel.
    """
    spread = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)
    near = np.argsort(((spread[:, None] - spread[None]) ** 2).sum(axis=2), axis=1, kind="stable")
    everyone = np.arange(features.shape[0])
    chosen = np.empty(gains.shape[:2], dtype=np.int64)
    for kernel in everyone:
        rest = everyone[everyone != kernel]
        scores = np.array([_scores(each, near, gains, rest) for each in rules]) if len(rules) > 1 else np.zeros((1, 2))
        behind = scores[scores.sum(axis=1).argmax()] - scores
        error = behind.std(axis=1, ddof=1) / np.sqrt(behind.shape[1]) if is_cautious else 0.0
        rule = rules[int((behind.mean(axis=1) <= error).argmax())]
        chosen[:, kernel] = _estimate(rule, near[kernel], gains, rest).argmax(axis=1)
    return chosen


def _scores(rule: CoarseningRule, near: Any, gains: Matrix, kernels: Any) -> Matrix:
    """The gain of each of `kernels`, over all GPUs, when it is predicted from the others of them."""
    found = np.empty(len(kernels))
    for number, kernel in enumerate(kernels):
        factors = _estimate(rule, near[kernel], gains, kernels[kernels != kernel]).argmax(axis=1)
        found[number] = np.take_along_axis(gains[:, kernel], factors[:, None], axis=1).mean()
    return found


def _estimate(rule: CoarseningRule, order: Any, gains: Matrix, known: Any) -> Matrix:
    """The gain of each factor on each GPU, from the nearest of the kernels that are known."""
    nearest = order[np.isin(order, known)][: rule.neighbours]
    some = np.log(gains[:, nearest]) if rule.is_log else gains[:, nearest]
    own: Matrix = some.mean(axis=1)
    found: Matrix = rule.others * own.mean(axis=0) + (1 - rule.others) * own
    return found
