"""Several workers a site: their formula, what they equal, what crosses between sites, checkpoints, faults."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.errors import BadInput, TransportError
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from laconic_lab.clusters.launch import run_job
from reference import averaging as reference
from tests.consistency.least_squares import ETA, SIZE, Vector, gradient, start, train, train_rows

STEPS = 29
SPECS: dict[str, dict[str, Any]] = {
    "diloco(6)": {"period": 6},
    "diloco(6, delay=4, eager=true)": {"period": 6, "delay": 4, "eager": True},
    "diloco(7, fragments=2, delay=3, mix=0.5)": {"period": 7, "cuts": [0, 30, 40], "delay": 3, "mix": 0.5},
    "local(7, fragments=2)": {"period": 7, "cuts": [0, 30, 40], "mu": 0.0, "zeta": 1.0},
    "block_momentum(6, momentum=0.6, learning_rate=0.5)": {"period": 6, "mu": 0.6, "zeta": 0.5, "nesterov": False},
}
TWO_BY_TWO, THREE_BY_TWO, TURNS = [0, 0, 1, 1], [0, 0, 1, 1, 2, 2], [1, 0, 1, 0, 1, 0]


def _ranks(sites: list[int], site: int) -> list[int]:
    return [rank for rank, each in enumerate(sites) if each == site]


def _near_formula(found: list[dict[str, Tensor]], sites: list[int], options: dict[str, Any]) -> None:
    """Each rank's weights are those of the reference, whose workers are sites with the mean of their ranks' gradients;
    ranks of a site have the same bits before `finish`, all have them after."""
    order = list(dict.fromkeys(sites))

    def of_site(site: int, step: int, w: Vector) -> Vector:
        return np.asarray(np.mean([gradient(rank, step, w) for rank in _ranks(sites, order[site])], axis=0))

    rows, _ = reference.diloco(of_site, start(), len(order), STEPS, ETA, **({"cuts": [0, SIZE]} | options))
    for rank, each in enumerate(found):
        np.testing.assert_allclose(each["own"].double().numpy(), rows[order.index(sites[rank])], rtol=5e-5, atol=5e-5)
        assert torch.equal(each["own"], found[_ranks(sites, sites[rank])[0]]["own"])
        assert torch.equal(each["end"], found[0]["end"])


@pytest.mark.parametrize("sites", [TWO_BY_TWO, THREE_BY_TWO, TURNS])
@pytest.mark.parametrize("spec", SPECS)
def test_sites_are_the_workers_of_the_formula(spec: str, sites: list[int]) -> None:
    found = run_threads(len(sites), lambda t: train(spec, STEPS, World(t), sites=sites), timeout_s=60)
    _near_formula(found, sites, SPECS[spec])


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["gloo", "zmq", "mpi"])
def test_every_engine_gives_the_formula(engine: str) -> None:
    if engine == "mpi":
        pytest.importorskip("mpi4py")
    found = run_job(4, engine, train_rows, (list(SPECS), STEPS, TWO_BY_TWO), timeout_s=100)
    for spec, options in SPECS.items():
        rows = zip(*map(torch.tensor, found[spec]), strict=True)
        _near_formula([{"own": own, "end": end} for own, end in rows], TWO_BY_TWO, options)


NETWORK = nn.Sequential(
    nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
)
OVERLAPPED = "diloco(8, fragments=3, delay=2, mix=0.25)"


def _job(
    world: World, spec: str, codec: str = "none", dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    model = copy.deepcopy(NETWORK).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    return laconic.distribute(model, optimizer, consistency=spec, codec=codec, world=world, **options)


def _train(job: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + job.world.rank))
        job.optimizer.zero_grad()
        output = job.model(x.to(next(job.model.parameters()).dtype)).float()
        nn.functional.mse_loss(output, torch.tanh(x[:, :4] + x[:, 4:8])).backward()
        job.optimizer.step()


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _ended(job: Any) -> Tensor:
    job.finish()
    job.close()
    return torch.cat([_flat(job.model), *(buffer.float().reshape(-1) for buffer in job.model.buffers())])


def _trained(ranks: int, spec: str, steps: int = 30, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Each rank's weights before `finish`; weights and buffers after."""

    def work(transport: Any) -> tuple[Tensor, Tensor]:
        job = _job(World(transport), spec, **options)
        _train(job, range(steps))
        if hasattr(job, "settle_weights"):
            job.settle_weights()
        return _flat(job.model), _ended(job)

    found = run_threads(ranks, work, timeout_s=60)
    assert all(torch.equal(end, found[0][1]) for _, end in found)
    return found


@pytest.mark.parametrize("codec", ["none", "dynamic8", "topk(0.1)", "powersgd(2)"])
def test_one_site_is_sync(codec: str) -> None:
    sync = _trained(3, "sync", codec=codec)
    site = _trained(3, "diloco(8)", codec="topk(0.01)", site_codec=codec, sites=[4, 4, 4])
    for (one, _), (other, _) in zip(sync, site, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("codec", ["none", "dynamic8", "topk(0.1)"])
@pytest.mark.parametrize("spec", [OVERLAPPED, "diloco(8, delay=3, eager=true)", "local(4, state=average)"])
def test_sites_of_one_rank_are_workers(spec: str, codec: str) -> None:
    plain = _trained(2, spec, codec=codec)
    sites = _trained(2, spec, codec=codec, sites=[0, 1])
    for one, other in zip(plain, sites, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("spec", "codec", "site_codec"),
    [
        (OVERLAPPED, "topk(0.1)", "dynamic8"),
        ("local(4, state=average)", "none", "none"),
        ("block_momentum(4)", "fp4(e3m0)", "topk(0.1)"),
        ("diloco(4)", "powersgd(2)", "powersgd(2)"),
        ("natural(4)", "dynamic8", "none"),
        ("once", "none", "onebit"),
    ],
)
@pytest.mark.parametrize("sites", [THREE_BY_TWO, [0, 1, 1, 0, 0, 1]])
def test_a_site_holds_one_model_and_all_end_with_one(
    spec: str, codec: str, site_codec: str, sites: list[int]
) -> None:
    found = _trained(6, spec, 13, codec=codec, site_codec=site_codec, sites=sites)
    for site in set(sites):
        first, *others = (found[rank][0] for rank in _ranks(sites, site))
        assert all(torch.equal(first, other) for other in others)


def test_what_the_optimiser_remembers_is_averaged_over_sites() -> None:
    def work(transport: Any, state: str) -> Tensor:
        job = _job(World(transport), f"local(4, state={state})", sites=THREE_BY_TWO)
        _train(job, range(4))
        return torch.cat([held["momentum_buffer"].reshape(-1) for held in job.optimizer.state.values()])

    kept, averaged = (
        run_threads(6, lambda t, state=state: work(t, state), timeout_s=60) for state in ("keep", "average")
    )
    mean = torch.stack(kept).mean(0)
    for own in averaged:
        assert torch.equal(own, averaged[0])
        torch.testing.assert_close(own, mean)


def test_more_ranks_than_parameters_leave_some_without_a_share() -> None:
    """The model has two parameters, and its fragments one each; a site has three ranks."""
    sites = [0, 0, 0, 1, 1, 1]
    for spec, options in SPECS.items():
        found = run_threads(6, lambda t, spec=spec: train(spec, STEPS, World(t), sites=sites), timeout_s=60)
        _near_formula(found, sites, options)


@pytest.mark.parametrize("codec", ["none", "dynamic8", "int4"])
@pytest.mark.parametrize("spec", ["diloco(5)", "diloco(6, fragments=2, delay=2)"])
def test_every_byte_crosses_once_a_site(spec: str, codec: str) -> None:
    def work(transport: Any, sites: list[int]) -> int:
        job = _job(World(transport), spec, codec, sites=sites)
        _train(job, range(30))
        job.under_way.wait()
        return int(job.crossed_nbytes)

    plain = run_threads(3, lambda t: work(t, [0, 1, 2]), timeout_s=60)
    shared = run_threads(6, lambda t: work(t, THREE_BY_TWO), timeout_s=60)
    exchanges = 30 // 5 if spec == "diloco(5)" else 2 * 30 // 6
    for site, alone in enumerate(plain):
        own = [shared[rank] for rank in _ranks(THREE_BY_TWO, site)]
        headers = (64 if codec == "none" else 512) * exchanges  # of the payloads of one more rank
        assert 0.9 * alone <= sum(own) <= alone + headers
        assert max(own) < alone


@pytest.mark.parametrize("at", [7, 8, 9, 11])
@pytest.mark.parametrize(
    ("spec", "codec", "site_codec", "dtype"),
    [
        (OVERLAPPED, "topk(0.1)", "topk(0.05)", torch.float32),
        (OVERLAPPED, "none", "dynamic8", torch.bfloat16),
        ("diloco(8, delay=3, eager=true)", "dynamic8", "none", torch.float32),
    ],
)
def test_a_checkpoint_goes_on_to_the_bit(
    spec: str, codec: str, site_codec: str, dtype: torch.dtype, at: int
) -> None:
    def work(transport: Any) -> tuple[Tensor, Tensor]:
        world = World(transport)
        options: dict[str, Any] = {"codec": codec, "site_codec": site_codec, "sites": TWO_BY_TWO, "dtype": dtype}
        job = _job(world, spec, **options)
        _train(job, range(at))
        saved = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
        _train(job, range(at, 22))
        whole, job = _ended(job), _job(world, spec, **options)
        job.model.load_state_dict(saved[0])
        job.optimizer.load_state_dict(saved[1])
        _train(job, range(at, 22))
        return whole, _ended(job)

    found = run_threads(4, work, timeout_s=60)
    for whole, resumed in found:
        assert torch.equal(whole, resumed)
        assert torch.equal(whole, found[0][0])


def test_a_state_of_other_sites_is_refused() -> None:
    def work(transport: Any) -> list[str]:
        said = []
        for sites, others in ((TWO_BY_TWO, [0, 1, 0, 1]), (TWO_BY_TWO, None), (None, TWO_BY_TWO)):
            one, other = (_job(World(transport), "diloco(4)", sites=each) for each in (sites, others))
            with pytest.raises(BadInput) as caught:
                other.load_state_dict(one.state_dict())
            said.append(str(caught.value))
        return said

    turned, plain, given = run_threads(4, work, timeout_s=60)[3]
    assert turned == "the state is of a job with sites [0, 0, 1, 1], this one's are [0, 1, 0, 1]"
    assert plain == "the state is of a job with sites [0, 0, 1, 1], this one's are [0, 1, 2, 3]"
    assert given == "the state is of a job with sites [0, 1, 2, 3], this one's are [0, 0, 1, 1]"


@pytest.mark.parametrize("spec", ["diloco(8)", OVERLAPPED])
def test_a_lost_rank_is_named_in_both_sites_and_changes_nothing(spec: str) -> None:
    gone = threading.Event()

    def work(transport: Any) -> tuple[str, int | None] | None:
        world = World(transport)
        job = _job(world, spec, sites=TWO_BY_TWO)
        _train(job, range(7))
        if transport.rank == 1:
            world.close()
            gone.set()
            return None
        gone.wait(60)
        before = _flat(job.model)
        with world, pytest.raises(TransportError) as caught:
            _train(job, range(7, 30))
        if transport.rank == 0:  # it noticed before its next step
            assert torch.equal(_flat(job.model), before)
        return type(caught.value).__name__, caught.value.peer

    found = run_threads(4, work, timeout_s=60)
    assert found == [("PeerLost", 1), None, ("PeerLost", 1), ("PeerLost", 1)]


def test_explain_says_who_exchanges_what_with_whom() -> None:
    def work(transport: Any) -> tuple[str, int]:
        job = _job(World(transport), "diloco(4)", "dynamic8", sites=[0, 1, 2, 0, 1, 2], site_codec="int4")
        _train(job, range(9))
        return job.explain(), job.crossed_nbytes

    numel = sum(p.numel() for p in NETWORK.parameters())
    said, crossed = run_threads(6, work, timeout_s=60)[4]
    assert "site 1 of 3 has ranks 1, 4, which average gradients at every step with codec int4" in said
    assert "every 4 steps this rank exchanges its share, " in said
    assert f"of {numel:,} values, with ranks 3, 5 of other sites; it has sent them {crossed:,} B so far" in said
    with laconic.init() as world:
        assert "site" not in _job(world, "diloco(4)").explain()
    (one, _), _ = run_threads(2, lambda t: (_job(World(t), "diloco(4)", sites=[0, 0]).explain(), 0), timeout_s=60)
    assert "site 0 of 1 has ranks 0, 1" in one
    assert "there is no other site" in one


def test_what_is_sent_inside_a_site_is_counted_beside_what_crosses() -> None:
    def work(transport: Any) -> tuple[list[int], int]:
        job = _job(World(transport), "diloco(4)", sites=TWO_BY_TWO)
        _train(job, range(4))
        return [record.sent_nbytes for record in job.records], job.crossed_nbytes

    numel = sum(p.numel() for p in NETWORK.parameters())
    for sent, crossed in run_threads(4, work, timeout_s=60):
        gradients = min(sent)
        assert gradients == pytest.approx(4 * numel, rel=0.02)  # an all-reduce of two
        assert sent[:3] == [gradients] * 3
        assert crossed < 4 * numel
        assert sent[3] > gradients + crossed  # and its share, to its site


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ("diloco(4)", {"sites": [0, 0, 0, 1]}, "sites have equally many ranks, .*; these have 3, 1"),
        ("diloco(4)", {"sites": 3}, "these have 2, 1, 1"),
        ("diloco(4)", {"sites": [0, 0, 1]}, r"the site of each of 4 ranks, got \[0, 0, 1\]"),
        ("diloco(4)", {"sites": "0011"}, "the site of each of 4 ranks, got '0011'"),
        ("sync", {"sites": TWO_BY_TWO}, "consistency 'sync' has no option sites; it goes with modes of blocks"),
        ("gaia", {"sites": TWO_BY_TWO, "site_codec": "int4"}, "consistency 'gaia' has no option site_codec"),
        ("diloco(4)", {"site_codec": "int4"}, "site_codec is for what the ranks of a site send each other: give sites"),
        ("diloco(4)", {"sites": TWO_BY_TWO, "hosts": (0, 0, 1, 1)}, "leave hosts= out"),
        ("diloco(4)", {"sites": TWO_BY_TWO, "site_codec": "int5"}, "int5"),
    ],
)
def test_what_cannot_be_gets_one_sentence(spec: str, options: dict[str, Any], sentence: str) -> None:
    def work(transport: Any) -> None:
        with pytest.raises(BadInput, match=sentence):
            _job(World(transport), spec, **options)

    run_threads(4, work, timeout_s=60)


def test_a_number_of_sites_means_neighbours() -> None:
    def work(transport: Any) -> Any:
        return _job(World(transport), "local(4)", sites=2).levels.numbers

    assert run_threads(4, work, timeout_s=60) == [(0, 0, 1, 1)] * 4
