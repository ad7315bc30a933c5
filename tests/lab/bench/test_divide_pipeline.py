"""The rows of pipelines in `laconic bench divide`: complete, exact where they should be, and drawn."""

from __future__ import annotations

import pytest

from laconic.errors import BadInput
from laconic.lab.bench.divide_pipeline import PipelineSpec, measure, spans
from laconic.lab.report.charts import WIDE
from laconic.lab.report.lanes import lanes


@pytest.mark.processes
def test_rows_beside_torch_on_loopback() -> None:
    small = PipelineSpec(None, ("async", "dynamic8", "torch 1f1b"), layers=1, width=32, rows=4, micro=4, blocks=2)
    exact, coded, peer = measure(small, timeout_s=110)["results"]
    assert exact["max_error"] == peer["max_error"] == 0.0 < coded["max_error"] < 0.2
    assert exact["sent_nbytes"] == exact["predicted_nbytes"] == 4 * 4 * 32 * 4
    assert coded["sent_nbytes"] == coded["predicted_nbytes"]
    assert 0 < exact["bound_seconds"] < exact["step_seconds"]
    picture = lanes(spans(exact), WIDE, title="a step")
    assert all(f"stage {stage}, {way}" in picture for stage in (0, 1) for way in ("forward", "backward"))


def test_unknown_configurations_are_refused() -> None:
    with pytest.raises(BadInput, match="no pipeline 'zbv'; the valid ones: async"):
        PipelineSpec(configurations=("zbv",))
