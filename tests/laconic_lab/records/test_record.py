"""The record and the metrics: what is written is read, and what cannot be read is one sentence."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from laconic.errors import BadInput, RecordError
from laconic.storage.json_text import unseal
from laconic.storage.run_folders import make_folder
from laconic_lab.environment import run_environment
from laconic_lab.records import metrics
from laconic_lab.records.record import FILE, Record
from tests.laconic_lab.sample_records import compare_record

RECORD = compare_record()


def test_a_record_survives_the_file(tmp_path: Path):
    path = RECORD.save(tmp_path / "run")
    assert path.name == FILE
    assert Record.load(tmp_path / "run") == Record.load(path) == RECORD
    assert json.loads(path.read_text())["format"] == 2
    assert [p.name for p in path.parent.iterdir()] == [FILE]


def test_what_diverged_survives_the_file():
    record = compare_record()
    record.trials[0] = replace(record.trials[0], test_loss=math.inf, test_accuracy=math.nan)
    text = record.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    trial = Record.from_json(text).trials[0]
    assert trial.test_loss == math.inf
    assert math.isnan(trial.test_accuracy or 0)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.999])
def test_a_cut_off_record_is_one_sentence(part: float, tmp_path: Path):
    text = RECORD.to_json()
    (tmp_path / FILE).write_text(text[: int(part * len(text))])
    with pytest.raises(RecordError, match="not whole JSON") as caught:
        Record.load(tmp_path)
    assert str(tmp_path / FILE) in str(caught.value)
    assert "\n" not in str(caught.value)


def _unsealed() -> dict[str, Any]:
    return unseal(RECORD.to_json())


def _changed(**fields: object) -> str:
    return json.dumps({**_unsealed(), **fields})


def _without(*path: str | int) -> str:
    data = _unsealed()
    place = data
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return json.dumps(data)


def _with(value: object, *path: str | int) -> str:
    data = _unsealed()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "not an object of JSON"),
        ("{}", "no field 'format'"),
        (_changed(format=1), "of format 1; this version reads 2"),
        (_changed(format="1"), "of format '1'"),
        (_changed(surprise=1), "a field 'surprise' that this version does not know"),
        (_changed(kind="bench"), "kind: expected one of compare, train, got 'bench'"),
        (_changed(trials={}), "trials: expected a list"),
        (_without("workload", "dataset"), "workload has no field 'dataset'"),
        (_with("x", "trials", 2, "seed"), "trials[2].seed: expected a whole number, got 'x'"),
        (_with(True, "trials", 2, "seed"), "trials[2].seed: expected a whole number, got True"),
        (_with([1.0], "trials", 0, "step_seconds_interval"), "expected 2 values, got 1"),
        (_with("fast", "trials", 0, "seconds_total"), "seconds_total: expected a number, got 'fast'"),
        (_with(None, "trials", 0, "seconds_total"), "seconds_total: expected a number, got None"),
        (_with(7, "trials", 0, "curve", 1), "trials[0].curve[1]: expected an object, got 7"),
    ],
)
def test_wrong_records_are_one_sentence(text: str, says: str):
    with pytest.raises(RecordError) as caught:
        Record.from_json(text)
    assert says in str(caught.value)


def test_no_run_is_one_sentence(tmp_path: Path):
    with pytest.raises(RecordError, match="no run at"):
        Record.load(tmp_path / "nothing")
    (tmp_path / FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match=f"{FILE}: the record is not whole JSON"):
        Record.load(tmp_path)


def test_ids_do_not_collide(tmp_path: Path):
    now = datetime(2026, 11, 16, 10, 15, tzinfo=UTC)
    with ThreadPoolExecutor(3) as pool:
        made = [pool.submit(make_folder, "digits-mlp", tmp_path, now) for _ in range(3)]
    names = {each.result().name for each in made}
    assert names == {f"20261116-101500-digits-mlp{end}" for end in ("", "-2", "-3")}
    with pytest.raises(BadInput, match="a workload's name"):
        make_folder("../etc", tmp_path)


def test_environment_knows_this_machine():
    found = run_environment()
    assert {"cpu", "cores", "memory_nbytes", "os", "python", "torch", "numba", "laconic", "blas_threads"} <= set(found)
    assert found["memory_nbytes"] > 2**20
    json.dumps(found)


def test_metrics_are_appended_and_a_torn_line_is_left_out(tmp_path: Path):
    assert list(metrics.read(tmp_path)) == []
    metrics.add(tmp_path, trial=0, step=1, train_loss=2.5)
    metrics.add(tmp_path, trial=0, step=2, train_loss=math.nan)
    path = tmp_path / metrics.FILE
    path.write_text(path.read_text() + '{"trial": 0, "st')
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2]
    metrics.add(tmp_path, trial=0, step=3)
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2, 3]
