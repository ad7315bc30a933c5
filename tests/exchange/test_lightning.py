"""Lightning's DDPStrategy with Laconic's communication hook, with the real package and its own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("lightning_program.py")


@pytest.mark.slow  # `test_shared_state.py` trains by Lightning and resumes in every run
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["callback", "strategy"])
def test_the_hook_in_lightning(way: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), way],
        cwd=tmp_path, capture_output=True, text=True, timeout=220, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    numel = sum(len(weights) for weights in reports[0]["weights"])
    for report in reports:
        losses = report["losses"]
        assert report["world_size"] == 2
        assert len(losses) == 40
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert 0 < report["sent_nbytes"] < 0.5 * 40 * 4 * numel  # float32 by a ring among two sends each value once
        assert [name.rpartition("layers.")[2] for name in report["residuals"]] == ["0.weight", "2.weight"]
        assert report["weights"] == reports[0]["weights"]
