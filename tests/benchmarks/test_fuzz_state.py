"""Forged state, files and messages, 150 of each kind; `python -m benchmarks fuzz-state` tries 2,000."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz.fuzz_state import Fuzzer, targets


@pytest.mark.filterwarnings("ignore:The distribution is specified by")
def test_forged_content_is_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    for target in targets(tmp_path):
        fuzzer = Fuzzer(target)
        assert fuzzer.run(150) == []
        assert fuzzer.outcomes["read"] > 0, target.name
        assert fuzzer.outcomes["refused"] > 20, target.name
