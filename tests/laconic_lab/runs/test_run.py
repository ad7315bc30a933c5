"""A run's beginning: its folder is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.errors import StorageError
from laconic_lab.runs.run import Run
from laconic_lab.runs.spec import RunSpec
from laconic_lab.runs.workers import Workers


def _begin(runs: Path) -> Run:
    return Run.begin("compare", RunSpec("digits-mlp", 1, runs=runs), Workers(1), [])


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = [_begin(tmp_path) for _ in range(3)]
    assert len({run.folder for run in runs}) == 3
    assert [run.record.load(run.folder).id for run in runs] == [run.folder.name for run in runs]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "an unmounted disk")
    for runs in ("file", "link"):
        with pytest.raises(StorageError, match="cannot be written: File exists; the runs before are intact"):
            _begin(tmp_path / runs)
