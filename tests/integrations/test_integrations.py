"""Trainings by the frameworks people have: a line each, equal replicas, and resumed to the bit."""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from laconic.errors import MissingExtra, UnknownName
from laconic.transports.launcher import run_local
from tests.integrations.trainings import TRAININGS, run

NEEDS = {"trainer": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",),
         "lightning strategy": ("lightning",), "fabric": ("lightning",)}  # fmt: skip
MODULES = {"transformers": "huggingface", "accelerate": "huggingface", "lightning": "lightning", "ray": "ray"}


ONE_DOOR = ("fabric",)  # it has no optimiser when the model is made
BOTH = [(name, door) for name in TRAININGS for door in ("compress", "distribute")[: 1 if name in ONE_DOOR else 2]]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "door"), BOTH)
def test_a_training_is_compressed_and_resumed_to_the_bit(name: str, door: str, tmp_path: Path) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    first, second = run_local(2, run, (name, door, str(tmp_path)), timeout_s=110)
    for key in ("stopped", "resumed", "whole"):
        assert first[key] == second[key], f"replicas differ when {key}"
    assert first["resumed"] == first["whole"] != first["stopped"]
    for logs in first.get("logs", [])[:1]:
        assert logs["laconic/sent_nbytes"] < 0.5 * logs["laconic/dense_nbytes"], "seen by loggers that come first"


@pytest.mark.parametrize("package", MODULES)
def test_a_missing_framework_is_one_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def refuse(name: str, *about: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return genuine(name, *about, **more)

    monkeypatch.delitem(sys.modules, f"laconic.integrations.{package}", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    cure = rf"pip install 'laconic\[{MODULES[package]}\]'"
    with pytest.raises(MissingExtra, match=f"{package} is not installed; run: {cure}"):
        importlib.import_module(f"laconic.integrations.{package}")


def test_a_door_that_there_is_not_is_refused_at_once() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from laconic.integrations.lightning import LaconicCallback

    with pytest.raises(UnknownName, match="compress, distribute"):
        LaconicCallback("dynamic8", door="distibute")  # type: ignore[arg-type]
