"""Results are kept once, and used for nothing but what they were made from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from laconic.errors import StorageError
from laconic.storage.fingerprint import fingerprint
from laconic.storage.memo import Memo

DATA = [1.0, 2.0]


@dataclass(frozen=True)
class Pair:
    """Two numbers."""

    first: int
    second: float


def _mean() -> float:
    return sum(DATA) / len(DATA)


def test_a_result_is_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, Any]:
        calls.append(1)
        return {"weights": torch.arange(3), "errors": (0.5, float("inf"))}

    first, again = (Memo(tmp_path, "seed 1").recall("a name / of any kind", compute) for _ in range(2))
    assert len(calls) == 1
    assert torch.equal(first["weights"], again["weights"])
    assert first["errors"] == again["errors"]
    Memo(tmp_path, "seed 2").recall("a name / of any kind", compute)
    Memo(tmp_path, "seed 1").recall("a name", compute)
    assert len(calls) == 3
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:40])
    Memo(tmp_path, "seed 1").recall("a name", compute)
    assert len(calls) == 4
    Memo(None).recall("a name", compute)
    assert len(calls) == 5


def test_typed_results(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memo = Memo(tmp_path, {"threads": 4})
    assert memo.get("pairs", tuple[Pair, ...]) is None
    memo.put("pairs", (Pair(1, 2.0), Pair(3, float("inf"))), tuple[Pair, ...])
    assert memo.get("pairs", tuple[Pair, ...]) == (Pair(1, 2.0), Pair(3, float("inf")))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert memo.get("pairs", dict[str, Pair]) is None  # of another version
    assert "is made again" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_where_it_is_required(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        Memo(tmp_path / "file" / "folder", required=True)
    assert Memo(tmp_path / "file" / "folder").recall("sum", lambda: 3) == 3
    assert "is not kept" in caplog.text


def _closure(data: Any) -> Callable[[], Any]:
    return lambda: data


def _scaled(factor: float) -> Callable[[float], float]:
    def scaled(x: float, by: float = factor) -> float:
        return x * by

    return scaled


class Holding:
    """A trainer that holds its data."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def method(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (lambda: _closure(torch.ones(3)), lambda: _closure(torch.ones(3)), lambda: _closure(torch.zeros(3))),
        (lambda: _closure(np.ones(3)), lambda: _closure(np.ones(3)), lambda: _closure(np.ones(4))),
        (lambda: _scaled(1.0), lambda: _scaled(1.0), lambda: _scaled(2.0)),
        (lambda: partial(max, 1), lambda: partial(max, 1), lambda: partial(max, 2)),
        (lambda: Holding(torch.ones(2)), lambda: Holding(torch.ones(2)), lambda: Holding(torch.zeros(2))),
        (lambda: Holding(torch.ones(2)).method, lambda: Holding(torch.ones(2)).method,
         lambda: Holding(torch.zeros(2)).method),
        (lambda: nn.ReLU(), lambda: nn.ReLU(), lambda: nn.Tanh()),
        (lambda: {"a": {1, 2}}, lambda: {"a": {2, 1}}, lambda: {"a": {1, 3}}),
    ],
)  # fmt: skip
def test_what_differs_has_another_fingerprint(one: Any, same: Any, other: Any) -> None:
    assert fingerprint(one()) == fingerprint(same()) != fingerprint(other())


def test_what_a_function_reads_from_its_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(lambda: _mean())
    monkeypatch.setattr(f"{__name__}.DATA", [1.0, 3.0])
    assert fingerprint(lambda: DATA) != before



def test_what_contains_itself_has_a_fingerprint() -> None:
    one: list[Any] = [1]
    one.append(one)
    assert fingerprint(one) != fingerprint([1])
