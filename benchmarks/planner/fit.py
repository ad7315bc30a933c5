"""How far predicted steps are from measured ones, and the factors that bring them nearer.

Callers: `bench/planner.py`. Pure numbers. Whether a set-up is held out of the fit follows from a hash of its name, so
nobody chooses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from laconic.planner.plan import simplest
from laconic.planner.predict import Calibration, Prediction, door

Array = NDArray[np.float64]

_PULL = 0.05  # how strongly factors are drawn to what is known where measurements say little
_UNIT_S = 1e-3  # of overheads, so that all factors are of one size
_PLAIN = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
_OUTSIDE = 0.05  # of the steps below the interval, and as many above
_WITHIN, _NEVER = 1.05, 1.10


@dataclass(frozen=True)
class Case:
    """A set-up: predicted before calibration, and measured."""

    name: str
    group: str
    way: str
    found: Prediction
    measured_s: float

    @property
    def held_out(self) -> bool:
        """A third of all names."""
        return held_out(self.name)


def held_out(name: str) -> bool:
    """Whether a set-up of this name is kept from the fit.

    >>> sum(held_out(str(i)) for i in range(3000)) // 100
    9
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 3 == 0


def fit(cases: Sequence[Case], intervals: bool = True) -> dict[str, Calibration]:
    """Factors of each door that make predictions fit, and the interval; doors with few set-ups borrow from all others.

    First all set-ups together, drawn to factors of 1 and no overhead; then each door, drawn to what all gave.
    """
    common = _factors(_table(cases), _PLAIN)
    fitted = {}
    for name in sorted({door(case.found.strategy) for case in cases}):
        mine = [case for case in cases if door(case.found.strategy) == name]
        table = _table(mine)
        factors = _factors(table, common)
        low, high = _interval(table, common) if intervals else (1.0, 1.0)
        compute, processor, exposed, message, fixed = (float(factor) for factor in factors)
        fitted[name] = Calibration(compute, processor, exposed, message * _UNIT_S, fixed * _UNIT_S, low, high,
                                   f"{len(mine)} set-ups measured here")  # fmt: skip
    return fitted


def _table(cases: Sequence[Case]) -> Array:
    """What each factor is multiplied by, relative to the measured step."""
    measured = np.array([[c.measured_s] for c in cases])
    rows = [[c.found.compute_s, c.found.processor_s, c.found.exposed_s, _UNIT_S * c.found.crowding * c.found.messages,
             _UNIT_S * c.found.crowding] for c in cases]  # fmt: skip
    table: Array = np.array(rows) / measured
    return table


def _factors(table: Array, towards: Array) -> Array:
    """Relative least squares, none below zero, drawn towards what is known."""
    rows = np.vstack([table, _PULL * np.eye(len(towards))])
    found, _ = nnls(rows, np.concatenate([np.ones(len(table)), _PULL * towards]))
    return np.asarray(found)


def _interval(table: Array, towards: Array) -> tuple[float, float]:
    """Where nine of ten measured steps lie, as factors on predictions by a fit that has not seen them."""
    ratios = sorted(1.0 / float(row @ _factors(np.delete(table, place, axis=0), towards))
                    for place, row in enumerate(table))  # fmt: skip
    outside = max(1, int(_OUTSIDE * (len(ratios) + 1)))  # few ratios: the least and the greatest
    return min(ratios[outside - 1], 0.97), max(ratios[-outside], 1.03)


def calibrated(case: Case, fitted: Mapping[str, Calibration]) -> tuple[float, float, float]:
    """The prediction and its interval after the fit."""
    known = fitted.get(door(case.found.strategy), Calibration())
    seconds = case.found.calibrated(known)
    return seconds, known.low * seconds, known.high * seconds


def summary(cases: Sequence[Case], fitted: dict[str, Calibration]) -> dict[str, Any]:
    """Errors and coverage over what was held out; regret over all groups, each judged by a fit without it."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        seconds, low, high = calibrated(case, fitted)
        rows.append({"setup": case.name, "held_out": case.held_out, "predicted_seconds": seconds, "low": low,
                     "high": high, "measured_seconds": case.measured_s, "uncalibrated_seconds": case.found.seconds,
                     "group": case.group, "way": case.way})  # fmt: skip
    kept = [row for row in rows if row["held_out"]] or rows
    errors = [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in kept]
    inside = [row["low"] <= row["measured_seconds"] <= row["high"] for row in kept]
    return {
        "results": rows,
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "coverage": float(np.mean(inside)),
        "regret": _regret(cases),
        "calibration": {name: asdict(each) for name, each in fitted.items()},
    }


def _regret(cases: Sequence[Case]) -> dict[str, Any]:
    """How much slower the way that the planner would recommend is than the best measured, and than DDP.

    A group's choice is made by factors that were fitted without any of its own set-ups.
    """
    over_best, over_ddp = [], []
    for group in dict.fromkeys(case.group for case in cases):
        mine = [case for case in cases if case.group == group]
        others = fit([case for case in cases if case.group != group and not case.held_out], intervals=False)
        predicted = [replace(case.found, seconds=calibrated(case, others)[0]) for case in mine]
        measured = dict(zip((each.strategy for each in predicted), (case.measured_s for case in mine), strict=True))
        chosen = measured[simplest(predicted).strategy]
        over_best.append(chosen / min(measured.values()))
        over_ddp += [chosen / case.measured_s for case in mine if case.way == "ddp"]
    return {
        "groups": len(over_best),
        "within_5_percent": float(np.mean([ratio <= _WITHIN for ratio in over_best])),
        "worst_over_best": max(over_best),
        "worst_over_ddp": max(over_ddp, default=0.0),
        "never_10_percent_slower_than_ddp": max(over_ddp, default=0.0) <= _NEVER,
    }
