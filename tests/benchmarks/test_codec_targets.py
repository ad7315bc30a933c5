"""Goals for the speed of codecs: which are missed is said, and every goal is measured."""

from __future__ import annotations

from benchmarks.codecs import codec_targets
from laconic.codecs import codec
from laconic_lab.bench import codec_speed


def test_missed_targets_are_told() -> None:
    met = {"codec": "fp16", "encode_ratio": 1.5, "decode_ratio": 9.0}
    missed = {"codec": "onebit", "encode_feedback_ratio": 3.5}
    told = codec_targets.missed_targets({"results": [met, missed, {"codec": "none", "encode_ratio": 9.0}]})
    assert told == ["onebit encode_feedback: 3.50 × memcpy, goal 3.00"]


def test_every_goal_is_of_something_that_is_measured() -> None:
    record = codec_speed.run(list(codec_targets.TARGETS), numel=4096, repeats=1, peers=False)
    rows = {row["codec"]: row for row in record["results"]}
    for spec, goals in codec_targets.TARGETS.items():
        assert all(f"{operation}_ratio" in rows[str(codec(spec))] for operation in goals)
