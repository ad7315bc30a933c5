"""`laconic.all_reduce` and siblings, as a user calls them, on real gloo ranks, on threads and alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.errors import BadInput, Mismatch, UnknownName
from laconic.exchange import collectives
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World


def _every_kind_of_tensor() -> str:
    with laconic.init(timeout_s=30) as world:
        rank, size = world.rank, world.world_size
        ranks = sum(range(1, size + 1))
        for algorithm in ("auto", "native", *laconic.schedules.names()):
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32):
                x = torch.full((3, 5), rank + 1, dtype=dtype)
                assert laconic.all_reduce(x, algorithm=algorithm) is x
                assert torch.equal(x, torch.full((3, 5), ranks, dtype=dtype)), (algorithm, dtype)
            x = torch.arange(12.0).view(3, 4).t() * (rank + 1)  # non-contiguous
            laconic.all_reduce(x, algorithm=algorithm)
            assert torch.equal(x, torch.arange(12.0).view(3, 4).t() * ranks), algorithm
            slices = torch.zeros(10)
            slices[::2] = rank + 1.0
            laconic.all_reduce(slices[::2], algorithm=algorithm)
            assert slices.tolist() == [ranks, 0.0] * 5
            assert laconic.all_reduce(torch.empty(0, 3), algorithm=algorithm).shape == (0, 3)
            assert laconic.all_reduce(torch.tensor(1.0), "mean", algorithm=algorithm) == 1.0
        parameter = torch.nn.Parameter(torch.ones(4))
        assert laconic.all_reduce(parameter).tolist() == [float(size)] * 4
        assert laconic.all_reduce(torch.ones(2, dtype=torch.complex64) * 1j).tolist() == [size * 1j] * 2
        flags = torch.tensor([rank == 0, False])
        assert laconic.all_reduce(flags, "max").tolist() == [True, False]
        with pytest.raises(BadInput, match=r"mean of torch\.int64"):
            laconic.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
        with pytest.raises(UnknownName, match=r"did you mean 'ring'.*butterfly.*native"):
            laconic.all_reduce(torch.ones(2), algorithm="rign")
        with pytest.raises(BadInput, match="root must be a rank"):
            laconic.broadcast(torch.ones(2), root=size)

        x = torch.full((2, 3), float(rank))
        assert torch.equal(laconic.broadcast(x, root=size - 1), torch.full((2, 3), size - 1.0))
        x = torch.full((5,), rank + 1.0)
        laconic.reduce(x, root=1)
        assert rank != 1 or x.tolist() == [float(ranks)] * 5
        full = torch.arange(7.0) * (rank + 1)
        edges = laconic.schedules.bounds(7, size)
        mine = torch.arange(7.0)[int(edges[rank]) : int(edges[rank + 1])] * ranks
        assert torch.equal(laconic.reduce_scatter(full), mine)
        assert torch.equal(full, torch.arange(7.0) * (rank + 1))  # the input is left alone
        gathered = laconic.all_gather(torch.full((2, 2), rank, dtype=torch.int32))
        assert torch.equal(gathered[:, 0, 0], torch.arange(size, dtype=torch.int32))
        swapped = laconic.all_to_all(torch.arange(size) + 10 * rank)
        assert torch.equal(swapped, torch.arange(size) * 10 + rank)
        laconic.barrier()
        return world.engine


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["gloo", "zmq"])
def test_every_kind_of_tensor(engine: str) -> None:
    work = _every_kind_of_tensor if engine == "gloo" else _over_zmq
    assert run_local(3, work, timeout_s=100, environment={"LACONIC_ENGINE": engine}) == [engine] * 3


def _over_zmq() -> str:
    with laconic.init(timeout_s=30) as world:
        x = torch.full((5,), world.rank + 1.0)
        assert laconic.all_reduce(x).tolist() == [6.0] * 5
        with pytest.raises(UnknownName, match="valid ones: auto, butterfly"):
            laconic.all_reduce(x, algorithm="native")  # zmq has no all-reduce of its own
        return world.engine


def _native_and_empty_mismatch(what: str) -> str:
    with laconic.init(timeout_s=4) as world:
        odd = world.rank == 1
        try:
            if what == "native":
                laconic.all_reduce(torch.ones(2000 if odd else 1000), algorithm="native")
            else:
                laconic.all_reduce(torch.ones(0 if odd else 10), algorithm="ring")
        except Mismatch as error:
            return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("what", ["native", "empty"])
def test_sizes_that_gloo_would_abort_on(what: str) -> None:
    for text in run_local(3, _native_and_empty_mismatch, (what,), timeout_s=60):
        assert "2000" in text if what == "native" else "of 0 ×" in text


def _on_a_torch_group() -> list[float]:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    x = torch.tensor([dist.get_rank() + 1.0])
    if dist.get_rank() in (0, 2):
        laconic.all_reduce(x, algorithm="butterfly", group=group)
    everyone = laconic.all_reduce(torch.ones(1), algorithm="tree")
    for _, world in collectives._wrapped.values():
        world.close()
    laconic.init().close()
    dist.destroy_process_group()
    return [x.item(), everyone.item()]


@pytest.mark.processes
def test_torch_groups_and_an_initialised_torch() -> None:
    assert run_local(3, _on_a_torch_group, timeout_s=60) == [[4.0, 3.0], [2.0, 3.0], [4.0, 3.0]]


def test_threads() -> None:
    def work(transport):  # type: ignore[no-untyped-def]
        return laconic.all_reduce(torch.ones(5), algorithm="direct", group=World(transport)).tolist()

    assert run_threads(4, work) == [[4.0] * 5] * 4


def test_alone() -> None:
    with laconic.init() as world:
        assert (world.rank, world.world_size) == (0, 1)
        assert laconic.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
        assert laconic.all_gather(torch.ones(2)).shape == (1, 2)
        assert laconic.init() is world


def test_bad_input() -> None:
    with pytest.raises(UnknownName, match="valid ones: gloo, mpi, nccl, zmq"):
        laconic.init("infiniband")
    with pytest.raises(BadInput, match="World or a torch process group"):
        laconic.all_reduce(torch.ones(1), group="workers")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="dense"):
        laconic.all_reduce(torch.ones(2, 2).to_sparse())
    with pytest.raises(UnknownName, match="valid ones: max, mean"):
        laconic.all_reduce(torch.ones(2), "average")
    laconic.init().close()


def test_a_closed_world_is_not_opened_again_by_chance() -> None:
    laconic.init().close()
    with pytest.raises(BadInput, match=r"call laconic\.init\(\) to join"):
        laconic.all_reduce(torch.ones(3))
    with laconic.init() as world:
        assert laconic.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
        assert world.world_size == 1
