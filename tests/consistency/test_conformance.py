"""What every consistency mode promises; a new mode is picked up by its file alone, and trained by its `examples`.

One job of P processes trains all modes one after the other, each in a world of its own, so that starting the processes
is paid once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zmq.utils.garbage import GarbageCollectorThread

import laconic
from laconic.consistency import build, get, names
from laconic.errors import BadInput, UnknownName
from laconic.exchange.collectives import barrier
from laconic.transports.launcher import run_local
from laconic.workloads.data import load

SPECS = [spec for name in names() for spec in get(name).examples]
CASES = {spec: {"consistency": spec, "codec": "none"} for spec in SPECS} | {"by default": {"consistency": "sync"}}
pytestmark = pytest.mark.timeout(400)  # the first test of each number of ranks trains all modes
EPOCHS, BATCH, TARGET = 10, 64, 90.0  # the batch is that of all workers together


def _network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


@functools.cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load("digits")
    train, test = (split.x.reshape(len(split), -1).float() / 16 for split in (data.train, data.test))
    return train, data.train.y, test, data.test.y


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, epochs: int = EPOCHS) -> float:
    """Train on this rank's share of every batch; returns the test accuracy of what this worker then holds."""
    x, y, _, _ = _digits()
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH)[:-1]:
            mine = rows[rank::size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
    return _accuracy(model)


def _accuracy(model: nn.Module) -> float:
    _, _, x, y = _digits()
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def _threads() -> int:
    """Threads alive but for the one that pyzmq starts once a process, with the first message it does not copy."""
    return sum(not isinstance(each, GarbageCollectorThread) for each in threading.enumerate())


def _one(case: str) -> dict[str, Any]:
    """Train by one mode as a rank of the job."""
    threads = _threads()
    with laconic.init(timeout_s=60) as world:
        model = _network(seed=world.rank)  # differs; rank 0's is what all begin with
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        agreement = laconic.distribute(model, optimizer, **CASES[case])
        begun = _weights(model).clone()
        barrier(group=world)  # with shared weights nobody may step before all have looked
        _train(model, optimizer, world.rank, world.world_size)
        before = _weights(model).clone()
        saved = optimizer.state_dict()
        steps = agreement.step
        optimizer.load_state_dict(saved)
        agreement.finish()
        found = {
            "begun": begun, "before": before, "after": _weights(model).clone(),
            "accuracy": _accuracy(agreement.predictor()),
            "steps": steps, "restored": agreement.step, "records": list(agreement.records), "saved": "laconic" in saved,
            "sent": sum(each.sent_nbytes for each in agreement.records),
        }  # fmt: skip
        agreement.close()
        agreement.close()  # twice does no harm
    found["threads"] = _threads() - threads
    return found


def _all(cases: list[str]) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        try:
            found[case] = _one(case)
        except Exception as error:  # told by the test of this mode
            found[case] = {"error": f"{type(error).__name__}: {error}"}
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small are slower with several threads, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by case; only the modes whose tests were selected are trained."""
    items = [item for item in request.session.items if item.module is request.module and "ranks" in item.fixturenames]
    chosen = {item.callspec.params.get("case") for item in items if hasattr(item, "callspec")}
    return run_local(request.param, _all, ([case for case in CASES if case in chosen],), timeout_s=400)


@pytest.mark.parametrize("case", CASES)
def test_workers_train_digits_to_target_and_end_with_one_model(case: str, ranks: list[dict[str, Any]]) -> None:
    found = [rank[case] for rank in ranks]
    for rank, each in enumerate(found):
        assert "error" not in each, f"rank {rank}: {each.get('error')}"
        assert torch.equal(each["begun"], found[0]["begun"]), "all begin with rank 0's weights"
        assert torch.equal(each["after"], found[0]["after"]), "after finish() all hold one model"
        if build(CASES[case]["consistency"]).same_weights:
            assert torch.equal(each["before"], found[0]["before"]), "replicas drifted"
        assert torch.isfinite(each["after"]).all()
        assert each["accuracy"] >= TARGET


@pytest.mark.parametrize("case", CASES)
def test_steps_and_bytes_are_counted_state_is_saved_and_nothing_stays_behind(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    for each in (rank[case] for rank in ranks):
        assert "error" not in each, each.get("error")
        assert each["saved"]
        assert each["restored"] == each["steps"] > 0
        assert len(each["records"]) == each["steps"]
        assert [record.step for record in each["records"]] == list(range(each["steps"]))
        if not build(CASES[case]["consistency"]).one_host:
            assert each["sent"] > 0
        assert each["threads"] == 0


@functools.cache
def _plain(make: Any) -> Tensor:
    """The weights that the optimiser leaves when it trains alone."""
    plain = _network()
    _train(plain, make(plain.parameters(), lr=0.01), 0, 1, epochs=1)
    return _weights(plain)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_one_worker_equals_the_plain_optimiser(spec: str, make: Any) -> None:
    ours = _network()
    optimizer = make(ours.parameters(), lr=0.01)
    with laconic.init() as world:
        job = laconic.distribute(ours, optimizer, world=world, **CASES[spec])
        _train(ours, optimizer, 0, 1, epochs=1)
        job.finish()
        assert torch.equal(_plain(make), _weights(ours))
        job.close()


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_describes_its_mode(spec: str) -> None:
    mode = build(spec)
    assert build(str(mode)) == mode
    assert mode.summary
    assert not mode.summary.endswith(".")


def test_bad_specs_get_one_sentence() -> None:
    with pytest.raises(UnknownName, match="sync"):
        build("synch")
    with pytest.raises((BadInput, UnknownName)):
        build("sync(speed=3)")
