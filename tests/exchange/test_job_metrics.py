"""`job.metrics()`: the last whole step, flat, for loggers."""

from __future__ import annotations

import torch

import laconic
from laconic.exchange.job import BucketRecord, step_metrics


def _record(step: int, bucket: int, numel: int, sent: int, seconds: float) -> BucketRecord:
    return BucketRecord(step, bucket, numel, "dynamic8", "direct", seconds, 0.1, 0.2, 0.3, sent, 2)


def test_a_step_that_is_under_way_does_not_count() -> None:
    records = [_record(0, 0, 100, 10, 1.0), _record(0, 1, 50, 5, 2.0), _record(1, 0, 100, 20, 3.0)]
    found = step_metrics(records, world_size=2)
    assert (found["step"], found["sent_nbytes"], found["exchange_s"]) == (0, 15, 3.0)
    assert found["dense_nbytes"] == 600
    found = step_metrics([*records, _record(1, 1, 50, 7, 5.0)], world_size=2)
    assert (found["step"], found["sent_nbytes"], found["exchange_s"]) == (1, 27, 8.0)
    assert found["exchange_s_median"] == 5.5
    assert found["codec"] == "dynamic8"
    assert step_metrics([], 2) == {}


def test_every_value_can_be_logged() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with laconic.distribute(model, optimizer, codec="dynamic8") as job:
        assert job.metrics() == {}
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        job.finish()
        found = job.metrics()
    assert found["step"] == 2
    assert all(isinstance(value, int | float | str) for value in found.values())
