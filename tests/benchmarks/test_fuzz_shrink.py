"""Damaged `.lac` files, 300 a seed; `python -m benchmarks fuzz-shrink` tries 10,000."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz.fuzz_shrink import Fuzzer


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_files_are_refused(tmp_path: Path, seed: int) -> None:
    """Some with checksums that fit, so that headers and coders themselves must hold; the command tries 10,000."""
    fuzzer = Fuzzer(tmp_path, seed)
    assert fuzzer.run(300) == []
    assert fuzzer.outcomes["refused"] > 150
    assert fuzzer.outcomes["decoded"] > 10  # the coders were reached
