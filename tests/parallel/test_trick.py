"""Dense layers in turns behind data-parallel ones: all schemes give the whole batch's gradient."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from laconic.errors import BadInput
from laconic.parallel import Data, Dense, Trick
from laconic.parallel.divide import CONTEXT, divide
from laconic.parallel.state import whole_state
from laconic.parallel.turns import row_counts, train_in_passes
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World, init
from tests.parallel.whole import check, close


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


@pytest.mark.parametrize("scheme", ["all", "turns", "shares"])
def test_dense_layers_updated_at_each_pass_are_those_of_one_process(scheme: str) -> None:
    """One process: convolutions on all rows, then for each turn forward, backward and an update of the dense layers."""
    rows, ranks, rate = 4, 2, 0.5
    torch.manual_seed(1)
    x, y = torch.randn(ranks * rows, 2, 6, 6, dtype=torch.float64), torch.arange(ranks * rows) % 5
    start, total = net(), 0.0
    whole = copy.deepcopy(start)
    seen = whole.features(x)
    gradient = torch.zeros_like(seen)
    for counts in zip(*(count for count in _own_rows(scheme, ranks, rows)), strict=True):
        index = torch.cat([torch.tensor(own, dtype=torch.int64) for own in counts])
        part = seen[index].detach().requires_grad_()
        loss = nn.functional.cross_entropy(whole.classifier(part), y[index])
        loss.backward()
        _descend(whole.classifier, rate)
        gradient[index] = part.grad * len(index) / len(x)
        total += float(loss.detach()) * len(index) / len(x)
    seen.backward(gradient)

    def work(transport):  # type: ignore[no-untyped-def]
        model = divide(copy.deepcopy(start), plan(scheme), world=World(transport))
        own = slice(transport.rank * rows, (transport.rank + 1) * rows)
        loss = train_in_passes(model.classifier, model.features(x[own]), y[own], nn.functional.cross_entropy,
                               lambda: _descend(model.classifier, rate))  # fmt: skip
        for key, parameter in model.features.named_parameters():
            close(parameter.grad, whole.features.get_parameter(key).grad, 1e-12, key)
        for key, value in whole_state(model).items():
            close(value, whole.state_dict()[key], 1e-12, key)
        return float(loss)

    assert sum(run_threads(ranks, work)) / ranks == pytest.approx(total, abs=1e-12)
    with pytest.raises(BadInput, match="divided in turns"):
        train_in_passes(whole.classifier, seen, y, nn.functional.cross_entropy, lambda: None)


def _own_rows(scheme: str, ranks: int, rows: int) -> list[list[range]]:
    """For each rank, the rows of the batch that it brings to each turn."""
    found = []
    for rank in range(ranks):
        sizes, start = [counts[rank] for counts in row_counts(scheme, (rows,) * ranks)], rank * rows
        edges = [start + sum(sizes[:turn]) for turn in range(len(sizes) + 1)]
        found.append([range(a, b) for a, b in pairwise(edges)])
    return found


def _descend(module: nn.Module, rate: float) -> None:
    for parameter in module.parameters():
        parameter.data -= rate * parameter.grad
        parameter.grad = None


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
