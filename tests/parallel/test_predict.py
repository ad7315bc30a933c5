"""What was predicted is what is counted, to the byte, on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from laconic.errors import BadInput
from laconic.parallel import Data, Dense, Local, Norm, Space, Stages, Trick
from laconic.parallel.divide import CONTEXT, divide
from laconic.parallel.predict import predict
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from laconic.workloads.models.cifar import LocallyConnected2d
from laconic.workloads.models.gpt import CharGPT


def network() -> nn.Sequential:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(7 * 9 * 2, 11), nn.ReLU(), nn.Linear(11, 6))
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2, 1), nn.Conv2d(3, 2, 3, padding=1),
        nn.Flatten(), dense,
    )  # fmt: skip


PLANS = {
    "dense": {"6.0": Dense("output"), "6.2": Dense("input")},
    "grids": {"6.0": Dense("summa"), "6.2": Dense("cannon")},
    "1.5d": {"6.0": Dense("1.5d", grid=2)},
    "space": {"0": Space(), "1": Norm(), "3": Space(), "4": Space()},
    "both": {"0": Space("both")},
    "rows": {"0": Data(), "1": Norm(), "6": Trick("turns"), "6.0": Dense("output"), "6.2": Dense("input")},
    "shares": {"0": Data((2, 1, 1, 2), "fp16"), "4": Space(), "6.0": Dense("input")},
}


@pytest.mark.parametrize("codec", [None, "dynamic8", ("qsgd(4)", "fp16")])
@pytest.mark.parametrize("name", sorted(PLANS))
def test_counted_is_predicted(name: str, codec: object) -> None:
    plan, model, counts = PLANS[name], network(), {"shares": [4, 2, 2, 4], "rows": [3] * 4}.get(name, [6] * 4)

    def work(transport):  # type: ignore[no-untyped-def]
        x = torch.ones(counts[transport.rank], 2, 8, 10)
        part = divide(copy.deepcopy(model), plan, codec=codec, world=World(transport))  # type: ignore[arg-type]
        part(x).sum().backward()
        foreseen = predict(model, plan, x, 4, codec=codec, rank=transport.rank)  # type: ignore[arg-type]
        return foreseen, getattr(part, CONTEXT).traffic

    for foreseen, traffic in run_threads(4, work):
        assert foreseen.nbytes == traffic.total_nbytes > 0
        for row in foreseen.rows:
            assert row.forward_nbytes == traffic.sent_nbytes[row.name, "forward"]
            assert row.backward_nbytes == traffic.sent_nbytes[row.name, "backward"]


@pytest.mark.parametrize("codec", [None, "dynamic8", ("qsgd(4)", "fp16")])
@pytest.mark.parametrize("batch", [8, 11])
def test_what_crosses_between_stages_is_predicted(codec: object, batch: int) -> None:
    """A GPT whose embedding is its last layer too: values that cross, and a weight that two stages have."""
    model = CharGPT(characters=11, length=6, layers=2, width=8, heads=2, tied=True)
    plan, tokens = Stages(("blocks.1", "norm"), 4, uneven=True), torch.arange(batch * 6).view(batch, 6) % 11

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    predicted = [predict(model, plan, tokens, 3, codec=codec, rank=rank) for rank in range(3)]  # type: ignore[arg-type]

    def work(transport):  # type: ignore[no-untyped-def]
        part = divide(copy.deepcopy(model), plan, codec=codec, world=World(transport))  # type: ignore[arg-type]
        foreseen = predicted[transport.rank]
        before = dict(part.traffic.sent_nbytes)  # copies of the tied weight
        part.step(tokens, tokens, loss)
        sent = {key: nbytes - before.get(key, 0) for key, nbytes in part.traffic.sent_nbytes.items()}
        assert sum(sent.values()) == foreseen.nbytes == part.predicted_nbytes(tokens) > 0
        for row in foreseen.rows:
            assert row.forward_nbytes == sent.get((row.name, "forward"), 0)
            assert row.backward_nbytes == sent.get((row.name, "backward"), 0)
        assert {row.name for row in foreseen.rows} == set(part.layout.boundaries)

    run_threads(3, work)
    assert "stage 0 → 1" in str(predicted[0])
    assert "tied: stages 0, 2" in str(predicted[0])


def test_locally_connected_layers_never_send_weights() -> None:
    model = nn.Sequential(LocallyConnected2d(2, 64, 8, 3))
    found = predict(model, {"0": Local()}, torch.ones(1, 2, 8, 8), 2)
    assert [row.name for row in found.rows] == ["0"]
    assert found.nbytes == 4 * 64 * 8 * 4  # the output's half; the input needs no gradient


def test_dense_as_the_formula_says() -> None:
    batch, inputs, outputs = 8, 12, 16
    model, x = nn.Sequential(nn.Linear(inputs, outputs)), torch.ones(batch, inputs, requires_grad=True)
    for ranks in (2, 4):
        row = predict(model, {"0": Dense("output")}, x, ranks).rows[0]
        assert row.forward_nbytes == 4 * batch * outputs * (ranks - 1) // ranks
        assert row.backward_nbytes == 4 * batch * inputs * (2 * (ranks - 1) / ranks)
        row = predict(model, {"0": Dense("input")}, x, ranks).rows[0]
        assert row.forward_nbytes == 4 * batch * outputs * (2 * (ranks - 1) / ranks)


def test_what_cannot_be_predicted_is_one_sentence() -> None:
    with pytest.raises(BadInput, match="a batch of 5 samples does not make 4 equal micro-batches"):
        predict(network(), Stages(), torch.ones(5, 2, 8, 10), 2)
    with pytest.raises(BadInput, match="1 cuts make 2 stages, and there are 3 ranks"):
        predict(network(), Stages("6"), torch.ones(4, 2, 8, 10), 3)
    with pytest.raises(BadInput, match="rank is from 0 to 1"):
        predict(network(), PLANS["dense"], torch.ones(1), 2, rank=2)  # type: ignore[arg-type]
