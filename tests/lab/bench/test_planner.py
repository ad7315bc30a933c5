"""The fit and the figures of `laconic bench planner`, on made measurements; the memory of one model for real."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from laconic.lab.bench.planner import CASES, WAYS, Case, _memory, calibrated, fit, held_out, summary
from laconic.planner.predict import Prediction


def made(seed: int = 0, noise: float = 0.02) -> list[Case]:
    """Set-ups whose steps take 1.3 · computing + 2 · codec + 0.9 · waiting + 2 ms, and a little noise."""
    draw, cases = np.random.default_rng(seed), []
    for workload, hosts, link in CASES:
        group = f"{workload} × {hosts}, {link}"
        for name, way in WAYS.items():
            compute, processor, exposed = draw.uniform(0.001, 0.1, 3)
            found = Prediction(replace(way, data=hosts), compute + processor + exposed, 0.0, 1.0, compute, processor,
                               exposed, exposed, 1e6, 1e8, 1.0)  # fmt: skip
            real = (1.3 * compute + 2 * processor + 0.9 * exposed + 0.002) * draw.normal(1, noise)
            cases.append(Case(f"{group}, {name}", group, name, found, real))
    return cases


def test_there_are_enough_set_ups_and_a_third_is_held_out() -> None:
    cases = made()
    assert len(cases) >= 60
    assert 0.2 < np.mean([case.held_out for case in cases]) < 0.45
    assert held_out("a") == held_out("a")


def test_the_fit_finds_what_was_put_in() -> None:
    cases = made()
    fitted = fit([case for case in cases if not case.held_out])
    assert set(fitted) == {"ddp", "compress", "distribute"}
    known = fitted["compress"]
    assert (known.compute, known.processor, known.exposed) == pytest.approx((1.3, 2.0, 0.9), rel=0.1)
    record = summary(cases, fitted)
    assert record["median_error"] < 0.05
    assert record["p90_error"] < 0.1
    assert record["coverage"] > 0.75
    assert record["regret"]["worst_over_best"] < 1.2
    rows = record["results"]
    assert {"setup", "held_out", "predicted_seconds", "low", "high", "measured_seconds"} <= rows[0].keys()
    assert rows[0]["predicted_seconds"] == calibrated(cases[0], fitted)[0]


def test_what_is_held_out_is_not_fitted() -> None:
    cases = made()
    spoilt = [replace(case, measured_s=9 * case.measured_s) if case.held_out else case for case in cases]
    fitted = fit([case for case in spoilt if not case.held_out])
    assert fitted == fit([case for case in cases if not case.held_out])
    assert summary(spoilt, fitted)["median_error"] > 0.8
    assert summary(spoilt, fitted)["coverage"] < 0.2


@pytest.mark.slow
@pytest.mark.alone
def test_memory_is_near_the_measured_peak() -> None:
    found = _memory("lenet", 1024)
    assert abs(found["error"]) < 0.25
