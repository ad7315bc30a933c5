"""The fit and the figures of `python -m benchmarks planner`, on made measurements; the memory of one model for real."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.planner.fit import Case, calibrated, fit, held_out, summary
from benchmarks.planner.groups import GROUPS, Group, _memory, bench, cases_of
from laconic.errors import BadInput
from laconic.planner.cost import cost
from laconic.planner.devices import device
from laconic.planner.predict import Prediction
from laconic.planner.work import estimate


def made(seed: int = 0, noise: float = 0.02) -> list[Case]:
    """Set-ups whose steps take 1.3 · computing + 2 · codec + 0.9 · waiting + crowding · (1 ms a message + 2 ms)."""
    draw, cases = np.random.default_rng(seed), []
    for group in GROUPS:
        for name, way in group.ways.items():
            compute, processor, exposed = draw.uniform(0.001, 0.1, 3)
            sent, crowding = int(draw.integers(1, 9)), group.hosts / 2
            found = Prediction(way, compute + processor + exposed, 0.0, 1.0, compute, processor, exposed, exposed, 1e6,
                               1e8, 1.0, sent, crowding)  # fmt: skip
            real = 1.3 * compute + 2 * processor + 0.9 * exposed + crowding * (0.001 * sent + 0.002)
            cases.append(Case(f"{group}, {name}", str(group), name, found, real * draw.normal(1, noise)))
    return cases


def test_there_are_enough_set_ups_of_every_kind_and_a_third_is_held_out() -> None:
    cases = made()
    assert len(cases) >= 60
    assert 0.2 < np.mean([case.held_out for case in cases]) < 0.45
    assert held_out("a") == held_out("a")
    assert {case.found.strategy.kind for case in cases} == {"data", "tensor", "pipeline", "hybrid"}


def test_the_fit_finds_what_was_put_in() -> None:
    cases = made()
    fitted = fit([case for case in cases if not case.held_out])
    known = fitted["compress"]
    assert (known.compute, known.processor, known.exposed) == pytest.approx((1.3, 2.0, 0.9), rel=0.1)
    assert (known.message_s, known.fixed_s) == pytest.approx((0.001, 0.002), abs=0.0015)
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


def kept(group: Group) -> dict[str, Any]:
    """What is kept of a group that was measured, with made figures."""
    ways = group.ways
    return {
        **asdict(group), "cores": 2, "ways": {name: asdict(way) for name, way in ways.items()},
        "work": asdict(estimate(cost(group.workload), device("xeon-core"))),
        "speeds": {way.codec: [1e-9, 1e-9] for way in ways.values()},
        "block_seconds": {name: [0.01, 0.012, 0.011] for name in ways},
    }  # fmt: skip


def test_what_was_measured_is_judged_again_and_not_measured_again(tmp_path: Path) -> None:
    groups = [Group("digits-mlp", hosts, "100mbit") for hosts in (2, 4)]
    file = tmp_path / "kept.json"
    file.write_text(json.dumps({"measured": {str(each): kept(each) for each in groups}, "memory": [],
                                "environment": {}}))  # fmt: skip
    record = bench(groups, memory=False, keep=file, folder=tmp_path)
    assert len(record["results"]) == sum(len(each.ways) for each in groups)
    assert record["results"][0]["measured_seconds"] == 0.011
    assert json.loads(file.read_text())["median_error"] == record["median_error"]
    crowded = [case.found.crowding for case in cases_of(kept(groups[1]))]
    assert set(crowded) == {2.0}
    file.write_text("{}")
    with pytest.raises(BadInput, match="--keep"):
        bench(groups, memory=False, keep=file, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.alone
def test_memory_is_near_the_measured_peak() -> None:
    found = _memory("lenet", 1024)
    assert abs(found["error"]) < 0.25
