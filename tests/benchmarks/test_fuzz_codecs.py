"""Damaged payloads, a thousand per codec; `python -m benchmarks fuzz-codecs` tries 100,000, also bounds-checked."""

from __future__ import annotations

import pytest

from benchmarks.fuzz import fuzz_codecs
from tests.codecs.subjects import ALL

MUTATIONS = 1000


@pytest.mark.parametrize("spec", ALL)
def test_damaged_payload_gives_the_right_answer_or_payload_error(spec):
    fuzzer = fuzz_codecs.Fuzzer(spec)
    assert fuzzer.run(MUTATIONS) == []
    assert sum(fuzzer.outcomes.values()) == MUTATIONS
    # Both halves were really exercised: stale checksums refused, and bodies with a valid one parsed.
    assert fuzzer.outcomes["stale checksum, refused"] > MUTATIONS / 4
    assert fuzzer.outcomes["valid checksum, refused"] + fuzzer.outcomes["valid checksum, decoded"] > MUTATIONS / 4
    assert fuzzer.outcomes["valid checksum, decoded"] > 0
