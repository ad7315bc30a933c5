"""What a rank needs beyond DDP is bounded: a residual, messages, and what moves when DDP makes its buckets anew."""

from __future__ import annotations

import pytest

from laconic.lab.bench import memory


@pytest.mark.processes
def test_memory_beyond_ddp_is_bounded() -> None:
    rows = {row["way"]: row for row in memory.run(["dynamic8"], width=2048, layers=3)["results"]}
    gradients = rows["ddp"]["gradient_nbytes"]
    beyond = {way: (row["peak_nbytes"] - rows["ddp"]["peak_nbytes"]) / gradients for way, row in rows.items()}
    assert 0.5 < beyond["distribute"] < 2.25
    assert 1.0 < beyond["compress"] < 2.3
