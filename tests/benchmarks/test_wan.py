"""`python -m benchmarks wan`: its tables on a made record, and every part on a tiny case."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.planner.groups import Group
from benchmarks.wide import predictions, tables, torchft_steps, wan
from benchmarks.wide.curves import CurveSpec, stretch, train
from laconic.errors import BadInput
from laconic.workloads import get
from tests.benchmarks.commands import printed

pytestmark = pytest.mark.processes
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="emulated clusters need root on Linux with ip and tc",
)


def _steps(link: str, seconds: dict[str, float], alone: float) -> dict[str, Any]:
    results = [
        {"config": config, "step_seconds": taken, "compute_seconds": alone, "sent_nbytes": 1000.0}
        for config, taken in seconds.items()
    ]
    return {"configuration": {"workload": "w", "link": link, "blocks": 3}, "results": results}


def _curve(config: str, losses: list[float], sent: float = 100.0, seed: int = 0) -> dict[str, Any]:
    curve = [[10 * (place + 1), loss] for place, loss in enumerate(losses)]
    return {"workload": "w", "config": config, "seed": seed, "steps": 40, "curve": curve, "loss": losses[-1],
            "sent_nbytes": sent}  # fmt: skip


@pytest.fixture
def made() -> dict[str, Any]:
    """DDP reaches 2.0 after 20 of 40 steps, the others after 25 and 40; sparse ends 2 % higher at 1/60 of the bytes."""
    curves = [
        _curve(tables.DDP, [3.0, 2.0, 1.5, 1.0]),
        _curve(tables.OVERLAPPED, [4.0, 2.5, 1.5, 1.0]),
        _curve(tables.FLOAT32, [4.0, 3.5, 2.5, 2.0], sent=6000.0),
        _curve(tables.SPARSE, [4.0, 3.5, 2.5, 2.04]),
    ]
    found = _steps("10mbit,40ms", {tables.OVERLAPPED: 0.11, tables.BLOCKING: 0.2, tables.DDP: 10.0}, 0.1)
    return {"steps": {"a": found}, "losses": dict(enumerate(curves)), "planner": {}}


def test_seconds_to_a_loss_are_steps_to_it_times_a_step_on_the_link(made: dict[str, Any]) -> None:
    rows = {row["config"]: row for row in tables.time_rows(made)}
    assert rows[tables.DDP]["seconds_to_loss"] == pytest.approx(20 * 10.0)
    ours = rows[tables.OVERLAPPED]
    assert (ours["steps_to_loss"], ours["seconds_to_loss"]) == pytest.approx((25, 25 * 0.11))
    assert (ours["times_infinite_network"], ours["times_infinite_ddp"]) == pytest.approx((1.1, 25 * 0.11 / (20 * 0.1)))
    assert tables.FLOAT32 not in rows  # no step was measured


def test_torchft_has_the_steps_to_a_loss_of_the_formula_it_computes(made: dict[str, Any]) -> None:
    made["steps"]["b"] = _steps("10mbit,40ms", {tables.TORCHFT: 0.5}, 0.1)
    (row,) = (row for row in tables.time_rows(made) if row["config"] == tables.TORCHFT)
    assert row["seconds_to_loss"] == pytest.approx(40 * 0.5)  # as diloco in float32, which needs all 40 steps
    claimed = {each["claim"]: each["value"] for each in tables.claims(made)}
    best = f"w, 10mbit,40ms, 40 steps: {tables.OVERLAPPED}"
    assert claimed[f"{best}, times quicker than {tables.TORCHFT}"] == pytest.approx(20 / 2.75)


@needs_root
def test_torchft_is_measured_where_it_is_installed() -> None:
    pytest.importorskip("torchft")
    found = torchft_steps.measure("digits-mlp", "100mbit,5ms", period=2, blocks=1)
    (row,) = found["results"]
    assert row["config"] == tables.TORCHFT
    assert row["step_seconds"] > row["compute_seconds"] > 0
    assert row["sent_nbytes"] > 10_000


def test_a_loss_that_one_seed_does_not_reach_is_not_reached(made: dict[str, Any]) -> None:
    made["losses"]["b"] = _curve(tables.DDP, [3.0, 2.0, 1.5, 1.0], seed=1)
    made["losses"]["c"] = _curve(tables.OVERLAPPED, [4.0, 3.9, 3.8, 3.7], seed=1)
    assert [row["config"] for row in tables.time_rows(made)] == [tables.DDP]
    assert "not reached" in tables.table(made)


def test_claims_say_what_is_met(made: dict[str, Any]) -> None:
    found = {row["claim"]: (row["met"], row["value"]) for row in tables.claims(made)}
    place = "w, 10mbit,40ms: utilisation"
    assert found[f"{place}, overlapped"] == (False, pytest.approx(1 / 1.1))
    assert found[f"{place}, blocking"] == (True, 0.5)
    assert found["w, 40 steps: loss, sparseloco / dense"] == (False, pytest.approx(1.02))
    assert found["w, 40 steps: bytes, dense / sparseloco"] == (True, 60.0)
    best = f"w, 10mbit,40ms, 40 steps: {tables.OVERLAPPED}"
    assert found[f"{best}, × infinite, own steps"][0]
    assert not found[f"{best}, × infinite, DDP's steps"][0]
    assert found[f"{best}, times quicker than ddp"] == (True, pytest.approx(200 / 2.75))


def test_a_plan_of_rates_is_stretched_to_the_steps_that_are_made() -> None:
    task = get("shakespeare-lstm").prepare(0, get("digits-mlp").load())
    before = task.workload.plan
    stretch(task, 10, 2)
    in_all = task.workload.epochs * task.steps_per_epoch(2)
    assert task.workload.plan(5 / in_all) == pytest.approx(before(0.5))
    assert task.workload.plan(1.0) == before(1.0)


def test_losses_are_of_the_mean_of_all_workers_and_bytes_are_counted() -> None:
    ddp, apart = (train(CurveSpec("digits-mlp", config, 0, 8, 4)) for config in ("ddp", "none@diloco(4)"))
    assert [step for step, _ in ddp["curve"]] == [4, 8]
    assert ddp["curve"][-1][1] < ddp["curve"][0][1] < 2.4
    assert ddp["sent_nbytes"] == pytest.approx(4 * apart["sent_nbytes"], rel=0.01)  # 8 gradients, 2 outer steps


def test_parts_are_measured_once_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wan, "SYNCHRONOUS", ("ddp",))
    monkeypatch.setattr(wan, "BY_BLOCKS", ())
    words = [
        "wan",
        "--part",
        "losses",
        "--workload",
        "digits-mlp",
        "--steps",
        "8",
        "--output",
        str(tmp_path / "wan.json"),
    ]
    first = printed(capsys, *words)
    monkeypatch.setattr(wan, "train", None)  # nothing is left to train
    assert printed(capsys, *words) == first
    found = json.loads(printed(capsys, *words, "--json"))
    (piece,) = found["losses"].values()
    assert (piece["config"], piece["steps"], len(piece["curve"])) == ("ddp", 8, 4)
    assert found["peers"][-1].startswith("hivemind is not measured")


@needs_root
def test_steps_and_predictions_of_a_tiny_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "MODES", ("diloco(2)", "diloco(2, fragments=2)"))
    monkeypatch.setattr(predictions, "PERIOD", 2)
    piece = predictions.measure_group(Group("digits-mlp", 2, "100mbit,5ms"), blocks=1)
    assert set(piece["step_seconds"]) == set(piece["ways"])
    cases = list(predictions.cases_of(json.loads(json.dumps(piece))))
    assert len(cases) == 4
    assert all(case.found.seconds > 0.005 for case in cases)  # a round trip every second step
    found = predictions.judged(
        {"a": piece, "b": {**piece, "link": "20mbit,5ms"}, "c": {**piece, "hosts": 2, "link": "10mbit"}}
    )
    assert found is not None
    assert found["set_ups"] == 12
    assert 0 < found["held_out"] < 12


def test_a_file_of_something_else_and_an_unknown_part_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(BadInput, match="holds no record"):
        wan.WanRecord(tmp_path / "other.json")
    with pytest.raises(SystemExit):
        main(["wan", "--part", "speed"])
    assert "losses, planner, steps" in capsys.readouterr().err


def test_the_chart_has_a_line_for_each_configuration_over_the_rates(
    made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made["steps"]["b"] = _steps("100mbit,40ms", {tables.OVERLAPPED: 0.1, tables.DDP: 1.2}, 0.1)
    record, target = tmp_path / "wan.json", tmp_path / "wan.svg"
    record.write_text(json.dumps(made))
    words = ["chart-wan", "--workload", "w", "--record", str(record), "--output", str(target)]
    assert "wrote" in printed(capsys, *words)
    drawn = target.read_text()
    assert all(name in drawn for name in (tables.OVERLAPPED, "DDP on an infinite network", "after 20 steps"))
    with pytest.raises(SystemExit):
        main([*words, "--workload", "other"])
    assert "no time to a loss of 'other' is known" in capsys.readouterr().err
