"""Dense layers in turns behind data-parallel ones: all schemes give the whole batch's gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from laconic.errors import BadInput
from laconic.parallel import Data, Dense, Trick
from laconic.parallel.divide import CONTEXT, divide
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World, init
from tests.parallel.whole import check


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 9), nn.ReLU(), nn.Linear(9, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def plan(scheme: str, shares: tuple[int, ...] | None = None) -> dict[str, object]:
    return {"features": Data(shares), "classifier": Trick(scheme), "classifier.0": Dense("output"),
            "classifier.2": Dense("input"), "classifier.4": Dense("output")}  # fmt: skip


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize("scheme", ["all", "turns", "shares"])
@pytest.mark.parametrize("rows", [[3, 3], [2, 4, 6], [2, 2, 2, 2]])
def test_every_scheme_gives_the_whole_gradient(scheme: str, rows: list[int]) -> None:
    x = torch.randn(sum(rows), 2, 6, 6, dtype=torch.float64)
    check(net(), plan(scheme, tuple(rows)), len(rows), x, rows=rows)


def _on_gloo(scheme: str) -> tuple[list[float], int]:
    with init() as world:
        torch.manual_seed(0)
        model = divide(Net(), plan(scheme), codec="dynamic8", world=world)
        torch.manual_seed(world.rank)
        model(torch.randn(6, 2, 6, 6)).square().mean().backward()
        return [float(p.grad.norm()) for p in model.features.parameters()], getattr(model, CONTEXT).traffic.total_nbytes


@pytest.mark.parametrize("scheme", ["turns", "shares"])
def test_on_processes_that_overlap(scheme: str) -> None:
    one, two = run_local(2, _on_gloo, (scheme,), timeout_s=60)
    assert one[0] == two[0]
    assert one[1] > 0


def test_turns_need_rows_and_divided_layers() -> None:
    whole = net()

    def work(transport):  # type: ignore[no-untyped-def]
        wrong = [({"features": Dense("output")}, "is a Sequential"), ({"classifier.2": Data()}, "all layers")]
        for changed, words in wrong:
            with pytest.raises(BadInput, match=words):
                divide(copy.deepcopy(whole), {**plan("all"), **changed}, world=World(transport))  # type: ignore[dict-item]

    run_threads(2, work)
