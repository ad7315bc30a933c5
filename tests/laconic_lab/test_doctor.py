"""`laconic doctor`: what it finds, how it says so, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from laconic.cli import main
from laconic.errors import BadInput
from laconic_lab import doctor
from laconic_lab.doctor import Check, Diagnosis


def _check(verdict: doctor.Verdict) -> Check:
    def check() -> Iterator[Diagnosis]:
        yield Diagnosis("thing", verdict, "was looked at", "turn it round" if verdict == "wrong" else "")

    return check


def _broken() -> Iterator[Diagnosis]:
    yield Diagnosis("first", "ok", "came before")
    raise ValueError("no such thing\nand more")


def test_an_error_of_a_check_is_its_diagnosis_and_the_others_still_run() -> None:
    found = list(doctor.examine({"broken": _broken, "good": _check("ok")}))
    assert [(each.what, each.verdict) for each in found] == [("first", "ok"), ("broken", "wrong"), ("thing", "ok")]
    assert found[1].text == "ValueError: no such thing"
    assert found[1].cure


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("note", 0), ("wrong", 1)])
def test_only_what_is_wrong_ends_in_an_error(
    verdict: doctor.Verdict,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"thing": _check(verdict)})
    record = tmp_path / "record.json"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--record", str(record)])
    assert (ended.value.code or 0) == code
    assert ("turn it round" in capsys.readouterr().out) == bool(code)
    content = json.loads(record.read_text())
    assert content["found"][0]["verdict"] == verdict
    assert content["laconic"]


def test_what_is_installed_here_is_sound() -> None:
    checks = {name: doctor.CHECKS[name] for name in ("versions", "kernels", "network", "emulated links")}
    assert {each.verdict for each in doctor.examine(checks)} <= {"ok", "note"}


def test_an_old_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    (found,) = doctor.examine({"versions": doctor.CHECKS["versions"]})
    assert found.verdict == "wrong"
    assert "torch 2.6" in found.cure


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadInput, match="by itself"):
        list(doctor.examine({}))


@pytest.mark.slow
def test_the_whole_examination_finds_nothing_wrong() -> None:
    found = list(doctor.examine())
    assert not [each for each in found if each.verdict == "wrong"]
    assert {"gloo", "zmq", "training by DDP", "training by compress", "training by distribute"} <= {
        each.what for each in found
    }
