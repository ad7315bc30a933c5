"""The ratio of top-k's Assumption 1, by hand and in a short training."""

from __future__ import annotations

import pytest
import torch

from benchmarks.charts.chart_topk_assumption import smoothed
from benchmarks.codecs import topk_assumption as bench
from laconic.workloads import Changes


def test_the_ratio_is_that_of_the_formula() -> None:
    accumulated = torch.tensor([[3.0, 0.0, 2.0, 0.0], [0.0, 3.0, 2.0, 0.0]])  # of two workers; the mean's largest is 2
    step = torch.tensor([0.0, 0.0, 0.0, 4.0])
    found, rows = bench.ratio(accumulated, step, 0.25)
    assert rows.tolist() == [[3.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]]
    assert found == pytest.approx((1.5**2 + 1.5**2 + 2**2) ** 0.5 / 4)
    assert bench.ratio(accumulated[:1], step, 0.25)[0] == 0, "a worker alone keeps its own"
    assert bench.ratio(accumulated, step, 1.0)[0] == 0


def test_a_dense_training_is_plain_sgd_and_a_sparse_one_keeps_the_rest() -> None:
    run = bench.train("linear", 1.0, 4, 3, Changes())
    assert run["ratio"] == [0.0] * 3
    assert run["loss"][2] < run["loss"][0]
    task = Changes().of("linear").prepare(0)
    optimizer = torch.optim.SGD(task.model.parameters(), 1.0)
    for step in range(3):
        task.begin_step(optimizer, 0, step)
        optimizer.zero_grad()
        loss = task.loss(task.model, task.batch(0, step))
        loss.backward()
        assert float(loss.detach()) == pytest.approx(run["loss"][step], rel=1e-3)
        optimizer.step()
    sparse = bench.train("linear", 0.01, 4, 3, Changes())
    assert min(sparse["ratio"]) > 0
    assert sparse["loss"][2] > run["loss"][2]


def test_a_line_is_the_mean_of_its_steps() -> None:
    assert smoothed([1.0, 3.0]) == [(0.5, 1.0), (1.5, 3.0)]
    curve = smoothed([float(i) for i in range(600)])
    assert (len(curve), curve[0]) == (60, (5.0, 4.5))
