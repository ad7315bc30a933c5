"""The codec benchmarks' arithmetic and records; their speed is no business of a test."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from laconic.codecs import codec
from laconic.errors import BadInput
from laconic_lab.bench import codec_speed


def test_median_interval_follows_the_ranks():
    """n = 100, z = 1.96: ranks ⌊40.2⌋ = 40 and ⌈60.8⌉ = 61, of the values 1 … 100."""
    names = ("x_ns", "x_ns_interval", "x_ns_least")
    found = codec_speed._timing("x", [v * 1e-9 for v in range(100, 0, -1)], 1)
    assert [found[name] for name in names] == [pytest.approx(v) for v in (50.5, [40.0, 61.0], 1.0)]
    assert codec_speed._timing("x", [8e-9], 4) == dict(zip(names, (2.0, [2.0, 2.0], 2.0), strict=True))


def test_mean_errors_skip_zeros_in_the_relative_one_only():
    x = torch.tensor([0.0, 2.0, -4.0])
    assert codec_speed.mean_errors(x, torch.tensor([1.0, 1.0, -4.0]), chunk=2) == (0.25, 2 / 3)


def test_record_holds_what_is_promised():
    record = codec_speed.run(["none", "dynamic8", "topk(0.01)"], numel=20_000, threads=2, repeats=3)
    json.dumps(record, allow_nan=False)
    assert record["memcpy_ns"] > 0
    assert [row["codec"] for row in record["results"]] == ["none", "dynamic8", "topk"]
    for row in record["results"]:
        for operation in codec_speed.OPERATIONS:
            low, high = row[f"{operation}_ns_interval"]
            assert 0 < low <= row[f"{operation}_ns"] <= high
            assert math.isclose(row[f"{operation}_ratio"], row[f"{operation}_ns"] / record["memcpy_ns"])
        assert row["bits_per_element"] == 8 * row["nbytes"] / 20_000
    none, dynamic8, _ = record["results"]
    assert none["nbytes"] == 80_016
    assert none["mean_rel_error"] == none["mean_abs_error"] == 0
    assert 0 < dynamic8["mean_rel_error"] < 0.05
    assert torch.__version__.startswith(record["environment"]["versions"]["torch"])  # and what it was built for
    assert record["configuration"]["threads"] == 2


def test_thread_count_is_restored():
    before = torch.get_num_threads()
    codec_speed.run(["none"], numel=10, threads=before + 1, repeats=1, peers=False)
    assert torch.get_num_threads() == before


def test_absent_peers_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "piquant", None)
    peers = codec_speed.run(["none"], numel=100, repeats=1)["peers"]
    assert [p["peer"] for p in peers if p["installed"]] == ["torch float16 copy_"]
    assert [p["peer"] for p in peers if not p["installed"]] == ["bitsandbytes", "piquant"]


def test_default_specs_have_no_double():
    specs = codec_speed.default_specs()
    assert len(specs) == len(set(specs))
    built = [codec(spec) for spec in specs]
    assert all(codec(spec) in built for spec in codec_speed.MORE)


@pytest.mark.parametrize("bad", [{"numel": 0}, {"threads": 0}, {"repeats": 0}])
def test_bench_refuses_nonsense(bad):
    with pytest.raises(BadInput, match="at least 1"):
        codec_speed.run(["none"], **bad)
