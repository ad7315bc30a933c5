"""The rows of pipelines in `python -m benchmarks divide`: complete, exact where they should be, and drawn."""

from __future__ import annotations

import pytest

from benchmarks.divide.pipeline import Computing, PipelineSpec, measure, pays_below_bps, spans
from laconic.errors import BadInput
from laconic_lab.report.bars import lanes, timed
from laconic_lab.report.canvas import WIDE


@pytest.mark.processes
def test_rows_beside_torch_on_loopback() -> None:
    small = PipelineSpec(None, ("async", "dynamic8", "torch 1f1b"), layers=1, width=32, rows=4, micro=4, blocks=2)
    record = measure(small, timeout_s=110)
    exact, coded, peer = record["results"]
    assert exact["max_error"] == peer["max_error"] == 0.0 < coded["max_error"] < 0.2
    assert exact["sent_nbytes"] == exact["predicted_nbytes"] == 4 * 4 * 32 * 4
    assert coded["sent_nbytes"] == coded["predicted_nbytes"]
    assert min(exact["bound_seconds"], exact["step_seconds"], record["pays_below_bps"]) > 0
    picture = lanes(timed(spans(exact)), WIDE, title="a step").svg()
    assert all(f"stage {stage}, {way}" in picture for stage in (0, 1) for way in ("forward", "backward"))


def test_compression_pays_below_the_rate_at_which_its_work_equals_what_it_saves() -> None:
    spec = PipelineSpec(micro=8)  # 512 KiB of float32 a micro-batch, 128 KiB of dynamic8
    stages = [Computing(0.02, 0.04, 0.001, 0.001)] * 2
    rate = pays_below_bps(spec, stages)
    saved_s = 8 * (524_288 - 131_088) / rate  # on each way, once: computing is the bottleneck
    assert 2 * saved_s == pytest.approx((8 + 1) * 0.002, rel=0.01)


def test_unknown_configurations_are_refused() -> None:
    with pytest.raises(BadInput, match="no pipeline 'zbv'; the valid ones: async"):
        PipelineSpec(configurations=("zbv",))
