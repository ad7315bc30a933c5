"""local, once and block_momentum: equal to their formulas on real processes, through codecs, with any state rule."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import laconic
from laconic.consistency import build
from laconic.errors import BadInput, UnknownName
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from reference import averaging as reference
from tests.consistency.least_squares import ETA, gradient, start, train_all

STEPS = 24
BLOCKS = {
    "block_momentum(4, momentum=0.6)": (0.6, 1.0, False),
    "block_momentum(4, momentum=0.6, nesterov=true, learning_rate=0.8)": (0.6, 0.8, True),
    "block_momentum(4)": (1 - 1 / 3, 1.0, False),
}
SPECS = ["local(5)", "once", *BLOCKS]


def _near(ours: torch.Tensor, expected: Any) -> None:
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local(3, train_all, (SPECS, STEPS), timeout_s=100)


@pytest.mark.processes
def test_local_is_its_formula(ranks: list[dict[str, Any]]) -> None:
    expected = reference.local(gradient, start(), 3, STEPS, ETA, 5)
    for rank in range(3):
        _near(ranks[rank]["local(5)"]["own"], expected[rank])
        _near(ranks[rank]["local(5)"]["end"], expected.mean(axis=0))
    assert [bool(record.sent_nbytes) for record in ranks[0]["local(5)"]["records"][:10]] == 2 * [*4 * [False], True]


@pytest.mark.processes
def test_once_is_its_formula(ranks: list[dict[str, Any]]) -> None:
    expected = reference.local(gradient, start(), 3, STEPS, ETA, STEPS + 1)
    for rank in range(3):
        _near(ranks[rank]["once"]["own"], expected[rank])
        _near(ranks[rank]["once"]["end"], expected.mean(axis=0))
    sent = [record.sent_nbytes for record in ranks[0]["once"]["records"]]
    assert sum(sent[:-1]) == 0
    assert sent[-1] >= 4 * 40  # finish() counts to the last step


@pytest.mark.processes
@pytest.mark.parametrize("spec", BLOCKS)
def test_block_momentum_is_its_formula(spec: str, ranks: list[dict[str, Any]]) -> None:
    begin, model = reference.block_momentum(gradient, start(), 3, STEPS // 4, ETA, 4, *BLOCKS[spec])
    for rank in range(3):
        _near(ranks[rank][spec]["own"], begin[rank])
        _near(ranks[rank][spec]["end"], model)
        assert torch.equal(ranks[rank][spec]["end"], ranks[0][spec]["end"])


NETWORK = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))


def _teacher(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, torch.tanh(x[:, :4] + x[:, 4:8])


def _fit(world: World, spec: str, codec: str, steps: int, load: Any = None) -> dict[str, Any]:
    model = copy.deepcopy(NETWORK)  # threads share torch's random numbers
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    agreement = laconic.distribute(model, optimizer, consistency=spec, codec=codec, world=world)
    first = 0
    if load is not None:
        model.load_state_dict(load["model"])
        optimizer.load_state_dict(load["optimizer"])
        first = agreement.step
    losses = []
    for step in range(first, first + steps):
        x, y = _teacher(world.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    found = {
        "loss": sum(losses[-8:]) / 8,
        "sent": sum(record.sent_nbytes for record in agreement.records),
        "saved": {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()},
        "momentum": torch.cat([s["momentum_buffer"].reshape(-1).clone() for s in optimizer.state.values()] or [None])
        if optimizer.state
        else None,
    }
    agreement.finish()
    found["end"] = {key: value.clone() for key, value in model.state_dict().items()}
    agreement.close()
    return found


@functools.cache
def _exact(spec: str) -> list[dict[str, Any]]:
    return _together(spec, steps=96)


def _together(spec: str, codec: str = "none", steps: int = 48, loads: Any = None) -> list[dict[str, Any]]:
    return run_threads(
        3, lambda t: _fit(World(t), spec, codec, steps, None if loads is None else loads[t.rank]), timeout_s=60
    )


@pytest.mark.parametrize("spec", ["local(4)", "block_momentum(4, momentum=0.3)"])
@pytest.mark.parametrize("codec", ["dynamic8", "topk(0.1)", "onebit"])
def test_compressed_means_train_as_well_with_fewer_bytes(spec: str, codec: str) -> None:
    exact, coded = _exact(spec), _together(spec, codec, steps=96)
    assert coded[0]["sent"] < exact[0]["sent"] / 2
    assert coded[0]["loss"] < 1.3 * exact[0]["loss"]
    for each in coded:
        assert all(torch.equal(value, coded[0]["end"][key]) for key, value in each["end"].items())


@pytest.mark.parametrize(
    ("spec", "codec"),
    [("local(5)", "none"), ("local(5)", "topk(0.1)"), ("block_momentum(5, nesterov=true)", "onebit"), ("once", "none")],
)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(spec: str, codec: str) -> None:
    whole = _together(spec, codec, 24)
    half = _together(spec, codec, 12)  # in the middle of a block
    rest = _together(spec, codec, 12, [each["saved"] for each in half])
    for rank in range(3):
        for key, value in whole[rank]["end"].items():
            torch.testing.assert_close(rest[rank]["end"][key], value, rtol=1e-4, atol=1e-5)


def test_state_of_the_optimiser_is_kept_averaged_or_forgotten() -> None:
    kept, averaged, forgotten = (_together(f"local(4, state={rule})") for rule in ("keep", "average", "forget"))
    assert not torch.equal(kept[0]["momentum"], kept[1]["momentum"])
    assert torch.equal(averaged[0]["momentum"], averaged[1]["momentum"])
    assert forgotten[0]["momentum"] is None  # the last step was one of averaging
    assert averaged[0]["sent"] > 1.8 * kept[0]["sent"]


def test_buffers_are_averaged_at_the_end() -> None:
    found = _together("local(4)")
    before = torch.stack([each["saved"]["model"]["1.running_mean"] for each in found])
    assert not torch.equal(before[0], before[1])
    torch.testing.assert_close(found[2]["end"]["1.running_mean"], before.mean(0))
    assert int(found[2]["end"]["1.num_batches_tracked"]) == 48


def test_wrong_use() -> None:
    for arguments in ("local(0)", "local(2.5)", "local(true)"):
        with pytest.raises(BadInput, match="number of steps"):
            build(arguments)
    for arguments in ("momentum=1", "learning_rate=0"):
        with pytest.raises(BadInput, match=arguments[:8]):
            build(f"block_momentum(4, {arguments})")
    with pytest.raises(UnknownName, match="average, forget, keep"):
        build("local(4, state=mean)")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for spec, options, text in [
        ("once", {"codec": "dynamic8"}, "exactly"),
        ("local(4)", {"codec": "factors"}, "sends weights"),
        ("local(4)", {"momentum": 0.9}, "'local' has no option momentum; it has algorithm, exempt"),
    ]:
        with pytest.raises(BadInput, match=text):
            laconic.distribute(model, optimizer, consistency=spec, **({"codec": "none"} | options))
    with pytest.raises(BadInput, match="float32"):
        laconic.distribute(model.double(), optimizer, consistency="local(4)", codec="none")


def _moved(world: World) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = laconic.distribute(model, optimizer, consistency="local(1)", world=world, codec="none")
    model.weight.data = model.weight.data.clone()
    model(torch.ones(4)).sum().backward()
    try:
        optimizer.step()
    finally:
        job.close()


def test_parameters_that_were_replaced_are_noticed() -> None:
    with pytest.raises(BadInput, match=r"replaced after distribute"):
        run_threads(2, lambda transport: _moved(World(transport)))
