"""diloco: its formula with all options, torch's outer optimiser, checkpoints to the bit, faults that change nothing."""

from __future__ import annotations

import copy
import functools
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency import build
from laconic.consistency.elastic.door import way_for
from laconic.consistency.fragments import fragments_of
from laconic.errors import BadInput, Mismatch, TransportError
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from laconic_lab.clusters.launch import run_job
from reference import averaging as reference
from tests.consistency.least_squares import ETA, SIZE, gradient, start, train, train_rows

STEPS, M = 29, 3
SPECS: dict[str, dict[str, Any]] = {
    "diloco(6)": {"period": 6},
    "diloco(6, nesterov=false, momentum=0.5)": {"period": 6, "nesterov": False, "mu": 0.5},
    "diloco(6, delay=4)": {"period": 6, "delay": 4},
    "diloco(6, delay=4, mix=0.25)": {"period": 6, "delay": 4, "mix": 0.25},
    "diloco(6, delay=4, eager=true)": {"period": 6, "delay": 4, "eager": True},
    "diloco(7, fragments=2)": {"period": 7, "cuts": [0, 30, 40]},
    "diloco(7, fragments=2, delay=3, mix=0.5, eager=true, learning_rate=0.4)": {
        "period": 7, "cuts": [0, 30, 40], "delay": 3, "mix": 0.5, "eager": True, "zeta": 0.4,
    },
    "local(7, fragments=2, delay=3, mix=0.5)": {
        "period": 7, "cuts": [0, 30, 40], "delay": 3, "mix": 0.5, "mu": 0.0, "zeta": 1.0,
    },
    "block_momentum(6, momentum=0.6, delay=2, learning_rate=0.5)": {
        "period": 6, "delay": 2, "mu": 0.6, "zeta": 0.5, "nesterov": False,
    },
}  # fmt: skip


def _near_formula(found: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Each worker's weights are those of the reference, and after `finish` all are alike."""
    rows, _ = reference.diloco(gradient, start(), len(found), STEPS, ETA, **({"cuts": [0, SIZE]} | options))
    for rank, each in enumerate(found):
        np.testing.assert_allclose(each["own"].double().numpy(), rows[rank], rtol=5e-5, atol=5e-5)
        assert torch.equal(each["end"], found[0]["end"])


@pytest.mark.parametrize("spec", SPECS)
def test_every_option_is_its_formula(spec: str) -> None:
    found = run_threads(M, lambda t: train(spec, STEPS, World(t)), timeout_s=60)
    _near_formula(found, SPECS[spec])
    assert 3 < sum(bool(record.sent_nbytes) for record in found[0]["records"][:-1]) < STEPS


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["gloo", "zmq", "mpi"])
def test_every_engine_gives_the_formula(engine: str) -> None:
    if engine == "mpi":
        pytest.importorskip("mpi4py")
    found = run_job(M, engine, train_rows, (list(SPECS), STEPS), timeout_s=100)
    for spec, options in SPECS.items():
        rows = zip(*map(torch.tensor, found[spec]), strict=True)
        _near_formula([{"own": own, "end": end} for own, end in rows], options)


@pytest.mark.parametrize("spec", ["diloco(6, alone=true)", "diloco(6, delay=4, eager=true, alone=true)"])
def test_a_worker_alone_takes_outer_steps_where_it_is_asked_to(spec: str) -> None:
    with laconic.init() as world:
        found = train(spec, STEPS, world)
    _near_formula([found], SPECS[spec.replace(", alone=true", "")])


@pytest.mark.parametrize(("spec", "nesterov"), [("diloco(4)", True), ("diloco(4, nesterov=false)", False)])
def test_outer_steps_are_those_of_torch_to_the_bit(spec: str, nesterov: bool) -> None:
    mode: Any = build(spec)
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(1000, generator=draw)
    outer = torch.optim.SGD([copied := nn.Parameter(theta.clone())], 0.7, momentum=0.9, nesterov=nesterov)
    held = mode.held(theta)
    for _ in range(5):
        mean = theta + 0.1 * torch.randn(1000, generator=draw)
        copied.grad = theta - mean
        outer.step()
        theta = mode.merge(theta, mean, 2, held)
        assert torch.equal(theta, copied)


@pytest.mark.parametrize(("steps", "landed"), [(10, 4), (8, 2), (7, 1)])
def test_finish_takes_no_outer_step_that_nothing_led_to(steps: int, landed: int) -> None:
    """What was made while a mean travelled is dropped; one that `finish` awaits counts as if it had come by then."""
    spec = "diloco(6, delay=4)"
    _, theta = reference.diloco(gradient, start(), M, steps, ETA, period=6, cuts=[0, SIZE], delay=landed)
    for each in run_threads(M, lambda t: train(spec, steps, World(t)), timeout_s=60):
        np.testing.assert_allclose(each["end"].double().numpy(), theta, rtol=5e-5, atol=5e-5)


def test_fragments_are_whole_parameters_of_about_equal_size() -> None:
    sizes = [40, 1, 1, 30, 30, 1, 60, 5, 20]
    cut = fragments_of([nn.Parameter(torch.zeros(size)) for size in sizes], 4, 10)
    assert [[p.numel() for p in each.parameters] for each in cut] == [[40, 1, 1], [30, 30], [1, 60], [5, 20]]
    assert [(each.part.start, each.part.stop) for each in cut] == [(0, 42), (42, 102), (102, 163), (163, 188)]
    assert [each.offset for each in cut] == [0, 2, 5, 7]
    assert [len(each.parameters) for each in fragments_of([nn.Parameter(torch.zeros(9))] * 3, 3, 3)] == [1, 1, 1]


NETWORK = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
OVERLAPPED = "diloco(8, fragments=3, delay=2, mix=0.25)"
UNDER_WAY = {7: -1, 8: 0, 9: 0, 10: 1, 11: 1, 12: -1}  # which fragment, after how many steps


def _job(world: World, spec: Any, codec: str, dtype: torch.dtype = torch.float32, outer: Any = None) -> Any:
    model = copy.deepcopy(NETWORK).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    return laconic.distribute(model, optimizer, consistency=spec, codec=codec, world=world, outer=outer)


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _train(job: Any, steps: range) -> None:
    dtype = next(job.model.parameters()).dtype
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + job.world.rank))
        job.optimizer.zero_grad()
        output = job.model(x.to(dtype)).float()
        nn.functional.mse_loss(output, torch.tanh(x[:, :4] + x[:, 4:8])).backward()
        job.optimizer.step()


def _ended(job: Any) -> Tensor:
    job.finish()
    job.close()
    return _flat(job.model)


@pytest.mark.parametrize("at", UNDER_WAY)
@pytest.mark.parametrize(
    ("spec", "codec", "dtype"),
    [
        (OVERLAPPED, "topk(0.1)", torch.float32),
        (OVERLAPPED, "none", torch.bfloat16),
        ("diloco(8, delay=3, eager=true)", "dynamic8", torch.float32),
    ],
)
def test_a_checkpoint_with_fragments_under_way_goes_on_to_the_bit(
    spec: str, codec: str, dtype: torch.dtype, at: int
) -> None:
    def work(transport: Any) -> tuple[Tensor, Tensor, int]:
        world = World(transport)
        job = _job(world, spec, codec, dtype)
        _train(job, range(at))
        saved = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
        _train(job, range(at, 30))
        whole, job = _ended(job), _job(world, spec, codec, dtype)
        job.model.load_state_dict(saved[0])
        job.optimizer.load_state_dict(saved[1])
        _train(job, range(at, 30))
        return whole, _ended(job), saved[1]["laconic"]["under_way"]["number"]

    found = run_threads(2, work, timeout_s=60)
    for whole, resumed, number in found:
        assert torch.equal(resumed, whole)
        assert torch.equal(whole, found[0][0])
        assert spec != OVERLAPPED or number == UNDER_WAY[at]


@pytest.mark.parametrize("steps", range(7, 13))
def test_finish_completes_what_is_under_way_and_leaves_no_thread(steps: int) -> None:
    before = threading.active_count()

    def work(transport: Any) -> Tensor:
        job = _job(World(transport), OVERLAPPED, "dynamic8")
        _train(job, range(steps))
        return _ended(job)

    first, second = run_threads(2, work, timeout_s=60)
    assert torch.equal(first, second)
    assert threading.active_count() == before


def test_closing_with_a_fragment_under_way_leaves_no_thread() -> None:
    before = threading.active_count()

    def work(transport: Any) -> int:
        job = _job(World(transport), OVERLAPPED, "dynamic8")
        _train(job, range(8))
        number = job.under_way.number
        job.close()
        return int(number)

    assert run_threads(2, work, timeout_s=60) == [0, 0]
    assert threading.active_count() == before


def test_a_collective_of_the_loop_waits_for_what_is_under_way() -> None:
    def work(transport: Any) -> tuple[list[float], Tensor]:
        world = World(transport)
        job, sums = _job(world, OVERLAPPED, "dynamic8"), []
        for step in range(24):
            _train(job, range(step, step + 1))
            sums.append(float(laconic.all_reduce(torch.tensor([float(step)]), group=world)))
        return sums, _ended(job)

    for sums, ended in (found := run_threads(2, work, timeout_s=60)):
        assert sums == [2.0 * step for step in range(24)]
        assert torch.equal(ended, found[0][1])


def test_a_peer_that_is_lost_leaves_nothing_half_applied() -> None:
    gone = threading.Event()

    def work(transport: Any) -> Any:
        job = _job(World(transport), OVERLAPPED, "dynamic8")
        _train(job, range(7))
        if transport.rank == 1:
            transport.close()
            gone.set()
            return None
        gone.wait(60)
        _train(job, range(7, 9))  # fragment 0 is sent after step 8, and nobody knows yet
        theta, velocity = job.blocks.start.clone(), job.blocks.held["velocity"].clone()
        twin = copy.deepcopy(job.model)
        inner = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.5)
        inner.load_state_dict(copy.deepcopy(_plain_state(job)))
        with pytest.raises(TransportError) as caught:
            _train(job, range(9, 10))
        _train(_Loop(twin, inner, job.world), range(9, 10))
        assert torch.equal(_flat(job.model), _flat(twin)), "weights are those of the inner step"
        assert torch.equal(job.blocks.start, theta)
        assert torch.equal(job.blocks.held["velocity"], velocity)
        with pytest.raises(TransportError):
            job.finish()
        job.close()
        return type(caught.value).__name__

    assert run_threads(2, work, timeout_s=60)[0] == "PeerLost"


class _Loop:
    """What `_train` trains, without a job."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world


def _plain_state(job: Any) -> dict[str, Any]:
    """The inner optimiser's own state: `state_dict` would save the job's, which failed."""
    momenta = {i: {"momentum_buffer": s["momentum_buffer"]} for i, s in enumerate(job.optimizer.state.values())}
    plain = torch.optim.SGD(copy.deepcopy(job.model).parameters(), 0.05, momentum=0.5).state_dict()
    return {**plain, "state": momenta}


def test_what_cannot_be_gets_one_sentence() -> None:
    for spec, sentence in (
        ("diloco(3, fragments=4)", "4 fragments take turns in a period, got period=3"),
        ("diloco(8, fragments=2, delay=4)", "delay is below period / fragments = 4 steps"),
        ("local(8, delay=8)", "local: delay is below period / fragments = 8 steps"),
        ("diloco(8, fragments=0)", "fragments is a whole number from 1, got 0"),
        ("diloco(8, delay=-1)", "delay is a whole number from 0, got -1"),
        ("diloco(8, mix=1)", "mix, a worker's own share, is at least 0 and below 1, got 1"),
        ("diloco(8, eager=true)", "eager makes up for a delay, and there is none"),
        ("diloco(8, momentum=1)", "momentum is at least 0 and below 1"),
        ("diloco(8, learning_rate=0)", "learning_rate, of the outer steps, is above zero"),
        ("diloco(0)", "period is a number of steps above zero"),
    ):
        with pytest.raises(BadInput, match=sentence):
            build(spec)
    for spec, codec, sentence in (
        ("diloco(8, fragments=7)", "none", "7 fragments of 6 parameters"),
        ("diloco(8, fragments=2)", "powersgd", "codec 'powersgd' is for matrices: leave fragments out"),
    ):
        with laconic.init() as world, pytest.raises(BadInput, match=sentence):
            _job(world, spec, codec)
    for spec in ("diloco(8, fragments=2, delay=1)", "local(8, delay=2)", "streaming(40)"):
        with pytest.raises(BadInput, match=r"give delay=0, or use laconic\.distribute"):
            way_for(spec)


SGD = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("spec", ["diloco(4)", OVERLAPPED])
def test_an_outer_optimiser_of_torch_steps_as_the_mode_does(spec: str) -> None:
    def work(transport: Any, outer: Any) -> Tensor:
        job = _job(World(transport), spec, "dynamic8", outer=outer)
        _train(job, range(21))
        return _ended(job)

    rows = [row for outer in (SGD, None) for row in run_threads(2, lambda t, o=outer: work(t, o), timeout_s=60)]
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_an_outer_optimiser_follows_a_scheduler_and_goes_on_from_a_checkpoint_to_the_bit() -> None:
    def work(transport: Any) -> tuple[Tensor, Tensor]:
        whole, half = (_job(World(transport), OVERLAPPED, "dynamic8", outer=ADAM) for _ in range(2))
        halving = torch.optim.lr_scheduler.ExponentialLR(whole.outer, 0.5)
        _train(whole, range(11))
        halving.step()
        assert whole.outer.param_groups[0]["lr"] == 0.005
        assert "outer steps are those of Adam" in whole.explain()
        half.model.load_state_dict(copy.deepcopy(whole.model.state_dict()))
        half.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
        assert half.outer.param_groups[0]["lr"] == 0.005
        for job in (whole, half):
            _train(job, range(11, 30))
        return _ended(whole), _ended(half)

    found = run_threads(2, work, timeout_s=60)
    for one, other in found:
        assert torch.equal(one, other)
        assert torch.equal(one, found[0][0])


def test_an_outer_optimiser_that_cannot_be_gets_one_sentence() -> None:
    for spec, outer, sentence in (
        ("local(8)", SGD, "consistency 'local' has no option outer; it goes with diloco and its presets"),
        ("diloco(8)", torch.optim.LBFGS, "LBFGS evaluates the loss again"),
        ("diloco(8)", "adam", "outer= takes parameters and returns a torch optimiser"),
        ("diloco(8)", list, "outer= takes parameters and returns a torch optimiser"),
        ("diloco(8, delay=2, eager=true)", SGD, "eager=true goes with the mode's own outer steps"),
    ):
        with laconic.init() as world, pytest.raises(BadInput, match=sentence):
            _job(world, spec, "none", outer=outer)


PLAN: dict[int, str] = {0: "diloco(4, fragments=2, delay=1)", 6: "diloco(8, fragments=2, delay=1, learning_rate=0.3)"}


def test_a_plan_changes_period_and_outer_steps_when_a_period_has_ended() -> None:
    def work(transport: Any) -> list[str]:
        job = _job(World(transport), {0: "diloco(4)", 6: "diloco(6, learning_rate=0.3)"}, "none")
        _train(job, range(21))
        sent = [str(number + 1) for number, record in enumerate(job.records) if record.sent_nbytes]
        said = job.explain()
        job.close()
        return [*sent, said]

    *sent, said = run_threads(2, work, timeout_s=60)[0]
    assert sent == ["4", "8", "14", "20"]
    assert "planned: diloco(4) from step 0, diloco(6, learning_rate=0.3) from step 6" in said
    assert said.startswith("diloco(6, fragments=1")


def test_a_planned_mode_is_the_two_one_after_the_other_and_resumes_to_the_bit() -> None:
    def work(transport: Any) -> list[Tensor]:
        whole, half, plain = (_job(World(transport), each, "dynamic8") for each in (PLAN, PLAN, PLAN[0]))
        for job in (whole, plain):
            _train(job, range(8))
        begun = torch.equal(_flat(whole.model), _flat(plain.model))
        _train(whole, range(8, 11))
        half.model.load_state_dict(copy.deepcopy(whole.model.state_dict()))
        half.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
        assert begun
        assert str(half.mode) == PLAN[6]
        for job in (whole, half):
            _train(job, range(11, 30))
        plain.close()
        return [_ended(whole), _ended(half)]

    rows = [row for rank in run_threads(2, work, timeout_s=60) for row in rank]
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_a_plan_that_cannot_be_gets_one_sentence() -> None:
    for plan, sentence in (
        ({5: "diloco(8)"}, "a plan of modes has an entry for step 0"),
        ({}, "a plan of modes has an entry for step 0"),
        ({0: "diloco(8)", 9: "local(4)"}, "'local(4)' differs from 'diloco(8)' in more"),
        ({0: "diloco(8)", 9: "diloco(8, delay=2)"}, "differs from 'diloco(8)' in more"),
        ({0: "sync"}, "for those with a period, such as diloco and local, not for 'sync'"),
        ({0: "once"}, "not for 'once'"),
    ):
        with laconic.init() as world, pytest.raises(BadInput, match=re.escape(sentence)):
            _job(world, plan, "none")
    with laconic.init() as world:
        job = _job(world, PLAN, "none")
        with pytest.raises(BadInput, match="the state is of a job by 'diloco"):
            job.load_state_dict({**job.state_dict(), "mode": "diloco(99)"})
        job.close()


def test_ranks_with_other_outer_optimisers_are_told_so() -> None:
    def work(transport: Any) -> str:
        with pytest.raises(Mismatch) as told:
            _job(World(transport), "diloco(8)", "none", outer=(SGD, ADAM)[transport.rank])
        return str(told.value)

    assert all("outer" in text and "Adam" in text for text in run_threads(2, work, timeout_s=60))


def test_a_state_of_other_fragments_is_refused_whole() -> None:
    with laconic.init() as world:
        two = _job(world, "diloco(8, fragments=2, delay=2)", "none")
        three = _job(world, OVERLAPPED, "none")
        state = three.state_dict()
        with pytest.raises(BadInput, match="does not fit"):
            two.load_state_dict(state)
        damaged = {**state, "under_way": {**state["under_way"], "number": 5}}
        with pytest.raises(BadInput, match="it is of fragment 5, of 3"):
            three.load_state_dict(damaged)
        two.close()
        three.close()


def test_presets_say_what_they_are_and_what_is_given_comes_first() -> None:
    def work(transport: Any) -> list[str]:
        world, said = World(transport), []
        for spec, options in (
            ("sparseloco(8)", {}),
            ("streaming(8, fragments=2, delay=3)", {}),
            ("sparseloco(8)", {"codec": "int4", "feedback_decay": 0.5}),
        ):
            model = copy.deepcopy(NETWORK)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            job = laconic.distribute(model, optimizer, consistency=spec, world=world, **options)
            _train(job, range(20))
            said.append(job.explain())
            _ended(job)
        return said

    sparse, streaming, own = run_threads(2, work, timeout_s=60)[0]
    assert "sparseloco(8, fragments=1, delay=0, mix=0.0, momentum=0.0, learning_rate=1.0, nesterov=false" in sparse
    assert "with codec topk(192, bucket=4096)+int2, feedback_decay=0.8" in sparse
    assert "streaming(8, fragments=2, delay=3, mix=0.5, momentum=0.9" in streaming
    assert "with codec fp4(e3m0)\n" in streaming
    assert "with codec int4, feedback_decay=0.5\n" in own


def test_sparseloco_is_its_formula() -> None:
    """e ← β·e + Δ; send C(e); e ← e − C(e); θ ← θ − η·mean of what was sent; two workers, whose payloads go to both."""
    codec, steps, rate = laconic.codec("topk(2)"), 12, 0.1
    begin = torch.arange(1.0, 1201.0) / 1200

    def drift(rank: int, step: int) -> Tensor:
        return torch.randn(1200, generator=torch.Generator().manual_seed(10 * step + rank))

    def work(transport: Any) -> Tensor:
        model = nn.Linear(1200, 1, bias=False)
        model.weight.data.copy_(begin)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        job = laconic.distribute(
            model,
            optimizer,
            consistency="sparseloco(3, learning_rate=4)",
            codec=codec,
            algorithm="gather",
            world=World(transport),
        )
        for step in range(steps):
            model.weight.grad = drift(transport.rank, step).view(1, -1)
            optimizer.step()
        own = model.weight.detach().clone().view(-1)
        job.close()
        return own

    theta, left = begin.clone(), [torch.zeros(1200), torch.zeros(1200)]
    for block in range(steps // 3):
        sent = []
        for rank in range(2):
            moved = -rate * sum((drift(rank, 3 * block + step) for step in range(3)), torch.zeros(1200))
            left[rank] = 0.8 * left[rank] + moved
            kept = codec.decode(codec.encode(left[rank]), 1200)
            left[rank] = left[rank] - kept
            sent.append(kept)
        theta = theta + 4 * (sent[0] + sent[1]) / 2
    for own in run_threads(2, work, timeout_s=60):
        torch.testing.assert_close(own, theta, rtol=1e-5, atol=1e-6)


def test_long_sparse_steps_do_not_overshoot_where_all_values_move() -> None:
    def work(transport: Any) -> tuple[Tensor, Tensor]:
        job = _job(World(transport), "sparseloco(8, learning_rate=4)", "topk(0.05)")
        _train(job, range(3))
        return _flat(job.model), _ended(job)

    (one, end), (other, _) = run_threads(2, work, timeout_s=60)
    torch.testing.assert_close(end, (one + other) / 2)


@pytest.mark.parametrize("decay", [0.0, 1.5, -1, True, "0.5"])
def test_a_decay_that_cannot_be_gets_one_sentence(decay: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with laconic.init() as world, pytest.raises(BadInput, match="feedback_decay is above 0 and at most 1"):
        laconic.distribute(model, optimizer, consistency="diloco(4)", feedback_decay=decay, world=world)
    with laconic.init() as world, pytest.raises(BadInput, match="feedback_decay goes with codecs for flat gradients"):
        laconic.distribute(model, optimizer, codec="powersgd", feedback_decay=0.9, world=world)
