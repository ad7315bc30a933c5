"""Deep500's levels of networks and distributed training: the checks pass on what is right and fail on what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.__main__ import main
from benchmarks.training import distributed as distributed_check
from benchmarks.training import networks as network_check
from benchmarks.training.distributed import Row, passed, predicted
from laconic.errors import BadInput
from laconic.transports.launcher import run_local
from laconic.workloads import models


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [*sorted(set(network_check.small_names()) - {"cifar-resnet"}), "cifar-resnet(8)"])
def test_networks_agree_with_float64_and_with_differences(name: str) -> None:
    found = network_check.check(name, batch=2, directions=1, repeats=1)
    assert found.passed, found
    assert found.forward_error > 0  # float32 it was
    assert min(found.forward_seconds, found.backward_seconds) > 0


class _Wrong(torch.autograd.Function):
    """x², whose gradient is one part in a thousand too large."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.002 * x * gradient


class _Square(nn.Module):
    def __init__(self, wrong: bool, short: bool) -> None:
        super().__init__()
        self.inner, self.wrong, self.short = nn.Linear(8, 4), wrong, short

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.short and y.dtype == torch.float32:
            y = y.half().float()
        return _Wrong.apply(y) if self.wrong else y * y


@pytest.mark.parametrize(("wrong", "short"), [(False, False), (True, False), (False, True)])
def test_a_wrong_gradient_and_a_coarse_forward_are_noticed(
    wrong: bool, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "build", lambda name: _Square(wrong, short))
    square = models.registry.KnownNetwork("square", nn.Identity, (8,), 0, None, "")
    monkeypatch.setattr(models, "describe", lambda name: square)
    found = network_check.check("square", batch=4, directions=2, repeats=1)
    assert (found.gradient_error > network_check.GRADIENT_TOLERANCE) is wrong
    assert (found.forward_error > network_check.FORWARD_TOLERANCE) is short
    assert found.passed is not (wrong or short)


def test_networks_that_cannot_be_checked_say_so() -> None:
    with pytest.raises(BadInput, match="no dense tensor"):
        network_check.check("logistic")
    with pytest.raises(BadInput, match="2 or more"):
        network_check.check("mlp", batch=1)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_equal_the_sequential_oracle_and_bytes_equal_the_predicted(world_size: int) -> None:
    record = run_local(world_size, distributed_check.measure, (3, 1), timeout_s=110)[0]
    assert record["world_size"] == world_size
    assert 1e-9 < record["sequential_error"] < 1e-5  # float32 beside float64
    rows = {(row["codec"], row["algorithm"]): row for row in record["results"]}
    assert {("none", "ring"), ("none", "native"), ("dynamic8", "direct"), ("onebit", "gather")} <= set(rows)
    for row in rows.values():
        assert row["passed"], row
    if world_size > 1:
        assert min(rows["none", "ring"]["counted_nbytes"]) > 0
        assert rows["dynamic8", "direct"]["error"] > rows["none", "direct"]["error"]


def test_what_differs_does_not_pass() -> None:
    right = Row("none", "ring", 1e-7, [24, 24], [24, 24], True)
    assert passed(right, 1e-7)
    assert not passed(replace(right, error=1e-6), 1e-7)
    assert not passed(replace(right, counted_nbytes=[24, 25]), 1e-7)
    assert not passed(replace(right, replicas_identical=False), 1e-7)
    assert passed(replace(right, codec="dynamic8", error=0.1), 1e-7)
    assert not passed(replace(right, error=math.nan), 1e-7)


def test_predicted_bytes_by_hand() -> None:
    assert [predicted("none", "ring", 3, rank, 9) for rank in range(3)] == [48, 48, 48]  # 2·(P−1) chunks of 3 values
    assert [predicted("none", "tree", 2, rank, 9) for rank in range(2)] == [36, 36]
    assert predicted("none", "native", 3, 0, 9) is None
    assert predicted("dynamic8", "gather", 3, 0, 4096) == 2 * (predicted("dynamic8", "gather", 2, 0, 4096) or 0)


@pytest.mark.processes
def test_bench_distributed_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["distributed", "-n", "2", "--steps", "2"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "the same" in said
    assert "FAILS" not in said


def test_bench_networks_as_typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["networks", "digits-cnn", "--json"])
    assert ended.value.code == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert (row["name"], row["passed"]) == ("digits-cnn", True)
    monkeypatch.setattr(network_check, "GRADIENT_TOLERANCE", 0.0)
    with pytest.raises(SystemExit) as ended:
        main(["networks", "digits-cnn"])
    assert ended.value.code == 1
    assert "FAILS" in capsys.readouterr().out
