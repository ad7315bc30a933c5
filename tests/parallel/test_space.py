"""Convolutions, pools, locally connected layers and norms in strips, beside one process."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from laconic.errors import BadInput
from laconic.parallel import Data, Local, Norm, Space
from laconic.parallel.divide import divide
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from laconic.workloads.models.cifar import LocallyConnected2d
from tests.parallel.whole import check

WINDOWS = {"ranks": st.integers(1, 3), "kernel": st.integers(1, 4), "stride": st.integers(1, 3),
           "height": st.integers(5, 11), "width": st.integers(5, 9)}  # fmt: skip


def image(height: int, width: int, channels: int = 2) -> torch.Tensor:
    torch.manual_seed(height * 50 + width)
    return torch.randn(2, channels, height, width, dtype=torch.float64)


def fits(ranks: int, size: int, kernel: int, stride: int, padding: int = 0, dilation: int = 1) -> bool:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 >= ranks


@pytest.mark.parametrize("split", ["height", "width"])
@settings(max_examples=15)
@given(**WINDOWS, padding=st.integers(0, 3), dilation=st.integers(1, 2))
def test_convolutions(
    split: str, ranks: int, kernel: int, stride: int, height: int, width: int, padding: int, dilation: int
) -> None:
    assume(all(fits(ranks, size, kernel, stride, padding, dilation) for size in (height, width)))
    model = nn.Sequential(nn.Conv2d(2, 3, kernel, stride, padding, dilation)).double()
    check(model, {"0": Space(split)}, ranks, image(height, width))


@pytest.mark.parametrize("kind", [nn.MaxPool2d, nn.AvgPool2d])
@settings(max_examples=12)
@given(**WINDOWS, ceil=st.booleans(), padded=st.booleans())
def test_pools(kind: type, ranks: int, kernel: int, stride: int, height: int, width: int, ceil: bool,
               padded: bool) -> None:  # fmt: skip
    assume(all(fits(ranks, size, kernel, stride) for size in (height, width)))
    model = nn.Sequential(kind(kernel, stride, kernel // 2 if padded else 0, ceil_mode=ceil))
    check(model, {"0": Space("height")}, ranks, image(height, width))


def test_means_that_leave_the_padding_out() -> None:
    model = nn.Sequential(nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False))
    check(model, {"0": Space("width")}, 3, image(8, 9))


def tower() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(4, 3, (2, 3), dilation=2),
        nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Flatten(), nn.LazyLinear(5),
    ).double()  # fmt: skip


@pytest.mark.parametrize(("split", "ranks"), [("height", 2), ("height", 3), ("width", 4), ("both", 4), ("both", 6)])
def test_a_tower_stays_in_strips(split: str, ranks: int) -> None:
    model, x = tower(), image(19, 22)
    model(x)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    plan = {each: Space(split) for each in "0236"} | {"4": Norm()}
    check(model, plan, ranks, x)

    def work(transport):  # type: ignore[no-untyped-def]
        parts = divide(copy.deepcopy(model), plan, world=World(transport))
        return [(layer.takes, layer.gives) for layer in parts if hasattr(layer, "takes")]

    found = run_threads(ranks, work)[0]
    assert found[0] == ("whole", "area")
    assert found[-1] == ("area", "whole")


def test_strips_of_ranks_that_bring_rows() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(60, 4))
    plan = {"0": Space(), "2": Space(), "4": Data()}
    x = torch.randn(6, 2, 7, 8, dtype=torch.float64)
    check(model.double(), plan, 3, x, rows=[2, 2, 2])


def test_where_torch_is_silently_wrong() -> None:
    """A 3×3 convolution in two strips of width: the columns beside the cut need the neighbour's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), torch.randn(2, 3, 8, 8)
    alone = torch.cat([model(part) for part in x.chunk(2, dim=3)], dim=3)  # strips without a halo
    wrong = (alone - model(x)).abs().amax((0, 1, 2)) > 1e-3
    assert wrong.tolist() == [False] * 3 + [True] * 2 + [False] * 3
    check(model, {"0": Space("width")}, 2, x, tolerance=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_locally_connected(ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LocallyConnected2d(3, 4, 7, 3), nn.ReLU(), LocallyConnected2d(4, 2, 7, 5)).double()
    nn.init.normal_(model[0].bias)
    check(model, {"0": Local(), "2": Local()}, ranks, image(7, 7, 3))
    x = torch.randn(6, 3, 7, 7, dtype=torch.float64)
    check(model, {"0": Local(), "2": Local(), "1": Data()}, ranks, x, rows=[6 // ranks] * ranks)


@pytest.mark.parametrize("rows", [[2, 2], [4, 2], [1, 2, 3]])
@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_norms_over_all_ranks(rows: list[int], kind: str) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3) if kind == "1d" else nn.BatchNorm2d(3, momentum=None)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm, nn.Tanh()).double()
    x = torch.randn(sum(rows), 3, *([] if kind == "1d" else [4, 5]), dtype=torch.float64)
    check(model, {"0": Norm(), "1": Data(tuple(rows))}, len(rows), x, rows=rows)


def test_norms_where_a_rank_has_no_rows() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()).double()
    check(model, {"0": Norm(), "1": Data(ask=True)}, 2, torch.randn(4, 3, dtype=torch.float64), rows=[4, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_keep_statistics_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole, x = nn.BatchNorm2d(3), torch.randn(4, 3, 8, 9, dtype=dtype)
    part = copy.deepcopy(whole)
    expected = whole(x)

    def work(transport):  # type: ignore[no-untyped-def]
        model = nn.Sequential(copy.deepcopy(part), nn.Identity())
        divide(model, {"0": Norm(), "1": Data()}, world=World(transport))
        made = model(x.chunk(2)[transport.rank])
        assert made.dtype == dtype
        torch.testing.assert_close(made, expected.chunk(2)[transport.rank])
        torch.testing.assert_close(model[0].running_var, whole.running_var)

    run_threads(2, work)


@pytest.mark.parametrize(
    ("layer", "plan", "words"),
    [
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), Space(), "only padding with zeros"),
        (nn.MaxPool2d(2, return_indices=True), Space(), "returns indices"),
        (nn.Conv1d(2, 2, 3), Space(), "has one dimension"),
        (nn.BatchNorm2d(2), Norm(), "all ranks bring the same rows"),
        (nn.AdaptiveAvgPool2d(1), Space(), "is a AdaptiveAvgPool2d, and space divides"),
    ],
)
def test_what_cannot_be_divided_is_one_sentence(layer: nn.Module, plan: object, words: str) -> None:
    def work(transport):  # type: ignore[no-untyped-def]
        with pytest.raises(BadInput, match=words):
            divide(nn.Sequential(copy.deepcopy(layer)), {"0": plan}, world=World(transport))  # type: ignore[dict-item]

    run_threads(2, work)


def test_images_smaller_than_the_ranks() -> None:
    whole = nn.Sequential(nn.Conv2d(2, 2, 3))

    def work(transport):  # type: ignore[no-untyped-def]
        model = divide(copy.deepcopy(whole), {"0": Space()}, world=World(transport))
        with pytest.raises(BadInput, match="2 rows or columns of output for 3 ranks"):
            model(torch.randn(1, 2, 4, 9))

    run_threads(3, work)
