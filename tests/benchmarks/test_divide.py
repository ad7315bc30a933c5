"""The benchmark of divisions: torch's beside ours, bytes as predicted, the same values."""

from __future__ import annotations

import pytest

from benchmarks.divide import memory_limit
from benchmarks.divide.layers import DivideSpec, measure
from laconic.errors import BadInput, UnknownName


def test_dense_beside_tensor_parallel() -> None:
    record = measure(DivideSpec(batch=6, width=10, inner=14, blocks=1, steps=2, pin=False))
    rows = {row["config"]: row for row in record["results"]}
    assert list(rows) == ["torch-tensor-parallel", "divide:none", "divide:dynamic8"]
    for row in rows.values():
        assert row["step_seconds"] > 0
        assert row["bound_seconds"] > 0
    for name in ("divide:none", "divide:dynamic8"):
        assert rows[name]["sent_nbytes"] == rows[name]["predicted_nbytes"]
        assert 0 < rows[name]["wait_seconds"] < rows[name]["step_seconds"]
    assert rows["divide:none"]["predicted_nbytes"] == 2 * 4 * 6 * 10
    assert rows["torch-tensor-parallel"]["max_error"] < 1e-5
    assert 0 < rows["divide:dynamic8"]["max_error"] < 0.1


@pytest.mark.slow
def test_the_trick_beside_ddp() -> None:
    rows = measure(DivideSpec("trick", batch=2, blocks=1, steps=1, pin=False))["results"]
    ddp, *tricks = rows
    for row in tricks:
        assert row["sent_nbytes"] == row["predicted_nbytes"] < ddp["predicted_nbytes"] / 8
        assert row["max_error"] < 0.2


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(UnknownName, match="dense, trick"):
        DivideSpec("convolutions")
    with pytest.raises(UnknownName, match="configuration of dense"):
        DivideSpec(configurations=("ddp",))
    with pytest.raises(BadInput, match="2 hosts or more"):
        DivideSpec(hosts=1)


@pytest.mark.parametrize(("width", "limit_mb"), [(3_000, 96), pytest.param(10_000, 1024, marks=pytest.mark.slow)])
def test_a_model_that_fits_no_rank_trains_on_four(width: int, limit_mb: int) -> None:
    """Weights, gradients and momentum of 18 (200) million weights are 216 MB (2.4 GB), of which four ranks share."""
    record = memory_limit.measure(memory_limit.MemorySpec(width, limit_mb))
    alone, divided = record["results"]
    assert alone["weights"] == divided["weights"] == 2 * width * width
    assert "memory" in alone["failed"]
    assert divided["failed"] is None
    assert divided["state_nbytes_per_rank"] == 3 * 4 * 2 * width * width // 4
    assert divided["peak_mb"] < limit_mb < 12 * 2 * width * width / 2**20
    assert divided["losses"][-1] < divided["losses"][0]
