"""EASGD and EAMSGD: both formulas on real processes, through codecs, and what a checkpoint holds."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import laconic
from laconic.consistency import build
from laconic.errors import BadInput
from laconic.exchange.layout import Exemptions
from laconic.transports.base import Transport
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from reference import averaging as reference
from tests.consistency.least_squares import ETA, SIZE, gradient, start, train, train_all

STEPS = 25
PLAIN = {
    "easgd(0.2, 0.5, 1)": (0.2, 0.5, 1),
    "easgd(0.3, 0.9, 4)": (0.3, 0.9, 4),
    "easgd(period=3)": (0.3, 0.9, 3),  # α = β/m
}
MOMENTUM = {"easgd(0.2, 0.8, 3, momentum=0.6)": (0.2, 0.8, 3, 0.6)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local(3, train_all, ([*PLAIN, *MOMENTUM], STEPS), timeout_s=100)


@pytest.mark.processes
@pytest.mark.parametrize("spec", [*PLAIN, *MOMENTUM])
def test_easgd_is_its_two_formulas(spec: str, ranks: list[dict[str, Any]]) -> None:
    known = (gradient, start(), 3, STEPS, ETA)
    w, centre = reference.easgd(*known, *PLAIN[spec]) if spec in PLAIN else reference.eamsgd(*known, *MOMENTUM[spec])
    for rank in range(3):
        np.testing.assert_allclose(ranks[rank][spec]["own"].numpy(), w[rank], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(ranks[rank][spec]["end"].numpy(), centre, rtol=2e-5, atol=2e-5)
        assert torch.equal(ranks[rank][spec]["end"], ranks[0][spec]["end"])


@pytest.mark.processes
def test_only_every_period_is_sent_and_once_per_exchange(ranks: list[dict[str, Any]]) -> None:
    records = ranks[1]["easgd(0.3, 0.9, 4)"]["records"]
    sent = [record.sent_nbytes for record in records]
    assert [step for step, nbytes in enumerate(sent) if nbytes] == list(range(4, STEPS, 4))
    assert max(sent) >= 4 * 4 * SIZE // 3  # a ring's share: 2·(m−1)/m of the vector


@pytest.mark.parametrize("codec", ["dynamic8", "onebit", "topk(0.1)"])
def test_the_centre_converges_through_codecs(codec: str) -> None:
    """Exempt nothing: w is short, and short parameters would be sent exactly."""
    options = {"codec": codec, "exempt": Exemptions(vectors=False, smaller_than=0)}
    coded = run_threads(3, lambda t: train("easgd(period=2)", 150, World(t), **options), timeout_s=60)
    exact = run_threads(3, lambda t: train("easgd(period=2)", 150, World(t)), timeout_s=60)
    best = np.ones(SIZE)  # up to the mean of the ranks' offsets, which no w can follow
    error, reference_error = (float(np.linalg.norm(each[0]["end"].numpy() - best)) for each in (coded, exact))
    assert error < reference_error + 0.35
    assert sum(r.sent_nbytes for r in coded[0]["records"]) < sum(r.sent_nbytes for r in exact[0]["records"])


def test_an_asynchronous_centre_comes_as_near() -> None:
    together = run_threads(3, lambda t: train("easgd(period=2)", 60, World(t)), timeout_s=60)
    apart = run_threads(3, lambda t: train("easgd(period=2, asynchronous=true)", 60, World(t)), timeout_s=90)
    errors = [float(np.linalg.norm(each[0]["end"].numpy() - 1)) for each in (together, apart)]
    assert errors[1] < errors[0] + 0.5 < np.linalg.norm(start() - 1) / 2
    for each in apart:
        assert torch.equal(each["end"], apart[0]["end"])
        assert sum(record.sent_nbytes for record in each["records"]) > 29 * 4 * SIZE  # 29 visits
    assert sum(record.staleness or 0 for each in apart for record in each["records"]) > 0


def test_an_asynchronous_centre_goes_back_to_a_checkpoint() -> None:
    def work(transport: Transport) -> torch.Tensor:
        world, model = World(transport), nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        spec = "easgd(period=1, asynchronous=true)"
        job = laconic.distribute(model, optimizer, consistency=spec, codec="none", world=world)
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            for _ in range(3):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
            laconic.barrier(group=world)
            optimizer.load_state_dict(saved)
            laconic.barrier(group=world)
        job.finish()
        job.close()
        return model.weight.detach().clone()

    ends = run_threads(2, work)
    assert torch.equal(*ends)


def test_wrong_use() -> None:
    for arguments in ("alpha=1.5", "beta=0", "momentum=1", "alpha=-0.1"):
        with pytest.raises(BadInput, match=arguments.partition("=")[0]):
            build(f"easgd({arguments})")
    with pytest.raises(BadInput, match="number of steps"):
        build("easgd(period=0)")


def test_a_sparse_codec_does_not_count_a_distance_twice() -> None:
    """What top-k leaves out of w − w̃ is still there at the next exchange: with feedback the centre ran away."""

    def work(transport: Transport) -> float:
        target = torch.linspace(-1, 1, 400) + 0.1 * transport.rank
        model = nn.Linear(400, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        job = laconic.distribute(
            model, optimizer, consistency="easgd(period=2)", codec="topk(0.1)", world=World(transport),
            exempt=Exemptions(vectors=False, smaller_than=0),
        )  # fmt: skip
        for _ in range(150):
            optimizer.zero_grad()
            (0.5 * (model.weight - target).square().sum()).backward()
            optimizer.step()
        agreement = job
        agreement.finish()
        agreement.close()
        return float((model.weight.detach() - torch.linspace(-1, 1, 400) - 0.15).abs().max())

    assert max(run_threads(4, work)) < 0.05
