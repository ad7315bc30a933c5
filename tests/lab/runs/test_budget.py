"""A budget hands out every unit once, to whoever asks."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from laconic.lab.runs.budget import Budget


def _take_all(path: Path) -> list[int]:
    budget, taken = Budget(path, 500), []
    while (unit := budget.take()) is not None:
        taken.append(unit)
    budget.close()
    return taken


def test_every_unit_goes_to_one_process(tmp_path: Path) -> None:
    path = tmp_path / "budget"
    with ProcessPoolExecutor(3) as pool:
        parts = list(pool.map(_take_all, [path] * 3))
    assert sorted(unit for part in parts for unit in part) == list(range(500))
    Budget(path, 500).remove()
    assert not path.exists()
