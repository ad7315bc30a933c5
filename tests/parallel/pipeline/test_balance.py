"""Automatic cuts: the dynamic programme against every possibility, and what is measured."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laconic.errors import BadInput, PeerLost
from laconic.parallel.boundary import Boundary
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import balance, build
from laconic.parallel.pipeline.cutting import Traced
from laconic.transports.base import Transport
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from tests.parallel.pipeline.subjects import Convolutions, Skips, features, images, on_threads


@given(st.data())
@settings(max_examples=60)
def test_the_programme_finds_the_least_bottleneck_and_then_the_least_bytes(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.integers(0, 9).map(float), min_size=2, max_size=8))
    wires = data.draw(st.lists(st.integers(0, 9).map(float), min_size=len(seconds) - 1, max_size=len(seconds) - 1))
    stages = data.draw(st.integers(1, len(seconds)))

    def cost(cuts: tuple[int, ...]) -> tuple[float, float]:
        edges = [0, *(cut + 1 for cut in cuts), len(seconds)]
        parts = [sum(seconds[a:b]) for a, b in pairwise(edges)]
        return max([*parts, *(wires[cut] for cut in cuts)]), sum(wires[cut] for cut in cuts)

    found = tuple(balance.cut(seconds, wires, stages))
    assert cost(found) == min(map(cost, combinations(range(len(wires)), stages - 1)))


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = Convolutions()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    chance = torch.random.get_rng_state()
    cuts = balance.choose(Traced.of(model, training=True), 3, Boundary.of("dynamic8"), images(4))
    assert len(Traced.of(model, training=True).positions(cuts)) == 2
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), chance)
    assert all(p.grad is None for p in model.parameters())


def test_without_a_sample_weights_are_balanced() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 250), nn.Linear(250, 1))
    assert balance.choose(Traced.of(model, training=True), 2, Boundary.of(None), None) == ["4"]


@pytest.mark.usefixtures("one_thread")
def test_all_ranks_take_the_first_ones_cuts() -> None:
    found = on_threads(3, Skips(), Stages("auto", 4), lambda model, _: model.layout.cuts, sample=features(4))
    assert len(set(found)) == 1
    assert len(found[0]) == 2


@pytest.mark.parametrize(
    ("model", "sample", "sentence"),
    [
        (nn.Sequential(nn.Linear(12, 5)), features(4), "2 stages need as many layers, and the model has 1"),
        (Skips(), (torch.ones(4, 7),), r"the model does not take the sample of \(4, 7\): "),
        (Skips(), features(4) * 2, "sample holds the 1 inputs of a micro-batch, got 2"),
    ],
)
def test_what_only_the_first_rank_finds_is_told_to_all(
    model: nn.Module, sample: tuple[Tensor, ...], sentence: str
) -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(PeerLost if transport.rank else BadInput, match=None if transport.rank else sentence):
            build(copy.deepcopy(model), Stages("auto", 4), Boundary.of(None), World(transport), sample)

    run_threads(2, work)
