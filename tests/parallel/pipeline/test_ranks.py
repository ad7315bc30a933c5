"""Pipelines on real ranks: beside data-parallel groups, through checkpoints, and when a rank dies or stops."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.errors import LaconicError
from laconic.parallel.boundary import Boundary
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import Pipeline, build
from laconic.transports.launcher import LocalJob, run_local
from laconic.transports.world import World
from tests.parallel.pipeline.subjects import Skips, features, gradients, loss_fn, mlp, on_threads, one_process, targets

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[3]
TIMEOUT_S = 10.0


def _seeded() -> Skips:
    torch.manual_seed(0)
    return Skips()


def _beside_groups(codec: str) -> dict[str, Any]:
    """Two pipelines of two stages; each stage's two copies share their gradients."""
    world = laconic.init()
    torch.set_num_threads(1)
    replica, stage = divmod(world.rank, 2)
    with world.split([0, 0, 1, 1]) as line, world.split([0, 1, 0, 1]) as copies:
        model = build(_seeded(), Stages(("layers.3",), 4), Boundary.of(codec), line)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        job = laconic.distribute(model, optimizer, codec="none", world=copies)
        for step in range(4):
            model.step(features(16)[0][replica::2] + step, targets(16)[replica::2], loss_fn)
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        found = {key: value.clone() for key, value in model.state_dict().items()}
        whole = model.whole_state_dict()
        job.close()
    world.close()
    return {"own": found, "whole": whole, "stage": stage}


@pytest.mark.processes
def test_stages_and_data_parallel_groups_train_as_one_process() -> None:
    ranks = run_local(4, _beside_groups, ("none",), timeout_s=100)
    model = _seeded()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        for replica in range(2):
            inputs, answers = features(16)[0][replica::2] + step, targets(16)[replica::2]
            for part, answer in zip(inputs.chunk(4), answers.chunk(4), strict=True):
                (loss_fn(model(part), answer) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()
    for rank in ranks:
        for key, value in rank["own"].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
        assert (rank["whole"] is None) == (rank["stage"] == 1)
    assert list(ranks[0]["whole"]) == list(expected)
    plain = Skips()
    plain.load_state_dict(ranks[0]["whole"])
    assert all(torch.equal(plain.state_dict()[key], value) for key, value in ranks[1]["own"].items())


def _schedules(engine: str) -> list[dict[str, Tensor]]:
    """One step by each schedule, where values skip stages and receives are posted ahead."""
    torch.set_num_threads(1)
    found = []
    with laconic.init(engine) as world:
        for schedule in ("gpipe", "1f1b", "async"):
            model = laconic.divide(_seeded(), Stages(("layers.2", "layers.4"), 6, schedule), world=world)
            assert isinstance(model, Pipeline)
            model.step(features(), targets(), loss_fn)
            found.append(gradients(model))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["gloo", "zmq"])
def test_gradients_with_receives_posted_ahead_are_those_of_one_process_to_the_bit(engine: str) -> None:
    ranks, model = run_local(3, _schedules, (engine,), timeout_s=100), _seeded()
    one_process(model, features(), 6)
    for found in zip(*ranks, strict=True):
        merged = {key: gradient for rank in found for key, gradient in rank.items()}
        assert all(torch.equal(merged[key], gradient) for key, gradient in gradients(model).items())


def test_a_state_loads_into_the_plain_model_and_any_other_division() -> None:
    inputs = features()

    def save(model: Pipeline, world: World) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        model.step(inputs, targets(), loss_fn)
        torch.optim.SGD(model.parameters(), 0.5).step()
        return model.whole_state_dict(), model.state_dict()

    saved = on_threads(3, mlp(), Stages(("2", "5"), 4), save)
    whole = saved[0][0]
    assert whole is not None
    assert whole.keys() == {key for _, part in saved for key in part}
    plain = mlp()
    plain.load_state_dict(whole)

    def load(model: Pipeline, world: World) -> dict[str, Tensor]:
        model.load_state_dict(whole)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*nonsense"):
            model.load_state_dict({**whole, "nonsense": torch.ones(1)})
        model.step(inputs, targets(), loss_fn)
        return gradients(model)

    found = {key: each for rank in on_threads(2, mlp(), Stages(("7",), 4), load) for key, each in rank.items()}
    one_process(plain, inputs, 4)
    assert all(torch.equal(found[key], gradient) for key, gradient in gradients(plain).items())


def _until_the_fault(schedule: str, memory: str, fault: str, at: tuple[int, int]) -> dict[str, Any]:
    """Rank 1 dies, stops or fails in the third step, in one of its passes; what the others report, and when."""
    world = laconic.init(timeout_s=TIMEOUT_S)
    torch.set_num_threads(1)
    model = build(_seeded(), Stages(("layers.1", "layers.4"), 8, schedule, memory), Boundary.of(None), world)
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == at[0]:
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ValueError("a layer that fails")

    if world.rank == 1:
        layer = model.get_submodule("layers.2")
        layer.register_forward_pre_hook(count) if at[1] else layer.register_full_backward_hook(count)
    for step in range(4):
        begun = time.monotonic()
        try:
            model.step(features(16), targets(16), loss_fn)
        except (LaconicError, ValueError) as error:
            return {"step": step, "kind": type(error).__name__, "text": str(error), "s": time.monotonic() - begun}
    return {}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "memory", "fault", "at"),
    [("async", "flush", "die", (19, 1)), ("1f1b", "flush", "stop", (21, 0)), ("gpipe", "flush", "fail", (20, 1)),
     ("async", "stash", "die", (20, 1))],
)  # fmt: skip
def test_a_lost_rank_is_named_in_the_middle_of_any_schedule(
    schedule: str, memory: str, fault: str, at: tuple[int, int]
) -> None:
    job = LocalJob(3, _until_the_fault, (schedule, memory, fault, at))
    for outcome in job.outcomes(timeout_s=90, ranks=(0, 2)):
        report = outcome.value
        assert report, outcome
        assert report["kind"] == "PeerLost", report
        assert report["text"].startswith(f"[rank {outcome.rank}/3]")
        assert "peer 1" in report["text"]
        assert report["s"] < TIMEOUT_S + 6, report
        assert ("a layer that fails" in report["text"]) == (fault == "fail")
