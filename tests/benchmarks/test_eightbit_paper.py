"""The table of the 8-bit paper's CIFAR-10 experiment, and the views in which an image is tested."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.papers import eightbit_paper as paper
from laconic.errors import BadInput
from laconic.workloads.inputs import Pixels, ShiftedPixels

SETTINGS = paper.Settings(epochs=6, rate=0.06, fraction=1.0, workers=2)


def _run(codec: str, seed: int, error: float) -> dict[str, object]:
    return {"codec": codec, "seed": seed, "accuracy": 1 - error, "seconds": 10.0 + seed}


def test_means_are_over_the_seeds_that_all_types_have() -> None:
    runs = [_run("fp32", 0, 0.20), _run("dynamic8", 0, 0.21), _run("fp32", 1, 0.22), _run("dynamic8", 1, 0.21)]
    text = paper.cifar_table(SETTINGS, [*runs, _run("fp32", 2, 0.9)])
    assert "| `fp32` | 21.00 % | 20.00, 22.00 | – | 10 |" in text
    assert "| `dynamic8` | 21.00 % | 21.00, 21.00 | +0.0 % | 10 |" in text
    assert "0.00 % apart, within the paper's 2 %; farthest from fp32: 0.00 %" in text
    assert "no significant difference" in text
    assert "5.00 % apart, beyond" in paper.cifar_table(SETTINGS, runs[:2])
    with pytest.raises(BadInput, match="no seed yet"):
        paper.cifar_table(SETTINGS, [_run("fp32", 0, 0.2), _run("dynamic8", 1, 0.2)])


def test_runs_with_other_settings_are_not_replaced(tmp_path: Path) -> None:
    stored = tmp_path / "runs.json"
    assert paper._stored(stored, SETTINGS) == []
    stored.write_text(json.dumps({"settings": asdict(SETTINGS), "runs": [_run("fp32", 0, 0.2)]}))
    assert len(paper._stored(stored, SETTINGS)) == 1
    with pytest.raises(BadInput, match="another --output"):
        paper._stored(stored, paper.Settings(7, 0.06, 1.0, 2))


def test_ten_views_are_the_middle_and_the_corners_each_also_mirrored() -> None:
    cut = ShiftedPixels(Pixels(mean=(0.0,), deviation=(1.0,)), size=24, padding=0)
    image = torch.randint(0, 256, (1, 1, 32, 32), dtype=torch.uint8)
    seen = [cut(image, torch.tensor([view])) for view in paper.VIEWS]
    assert torch.equal(seen[0], cut(image))
    assert all(torch.equal(one.flip(3), other) for one, other in zip(seen[::2], seen[1::2], strict=True))
    whole = cut.pixels(image)
    corners = [whole[:, :, i : i + 24, j : j + 24] for i in (0, 8) for j in (0, 8)]
    assert all(torch.equal(one, other) for one, other in zip(seen[2::2], corners, strict=True))
