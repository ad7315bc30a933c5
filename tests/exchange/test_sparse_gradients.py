"""Embedding(sparse=True) under `compress` and `distribute`: the mean that DDP gives; and no future without an end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput, LaconicError
from laconic.exchange.layout import FlatGradients
from laconic.exchange.options import Options
from laconic.exchange.sparse_gradient import SparseGradient
from laconic.exchange.state import CompressionState
from laconic.transports.base import Transport, finish
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads

ROWS = 300


class _Model(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(ROWS, 16, sparse=sparse)
        self.rest = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.rest(self.bag(words))


def _words(step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, rows, (8, 4), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _train(ddp: nn.Module, model: _Model, steps: int = 3) -> list[torch.Tensor]:
    """The embedding's gradients, step by step, and at last its weights."""
    sparse = torch.optim.SparseAdam(model.bag.parameters(), 0.01)
    dense = torch.optim.SGD(model.rest.parameters(), 0.1)
    seen = []
    for step in range(steps):
        model.zero_grad()
        ddp(_words(step)).square().mean().backward()
        gradient = model.bag.weight.grad
        assert gradient.is_sparse
        seen.append(gradient.coalesce().clone())
        sparse.step()
        dense.step()
    return [*seen, model.bag.weight.detach().clone()]


def _against_ddp() -> dict[str, Any]:
    dist.init_process_group("gloo")
    world = laconic.init(timeout_s=20)
    found: dict[str, Any] = {}
    for spec in ("ddp", "none", "dynamic8", "topk(0.1)", "powersgd(2)"):
        model = _Model()
        ddp = DistributedDataParallel(model)
        job = None if spec == "ddp" else laconic.compress(ddp, spec)
        found[spec] = _train(ddp, model)
        if job is not None:
            job.finish()
            assert {r.algorithm for r in job.records if r.numel == ROWS * 16} <= {
                "ssar_recursive_doubling", "ssar_split_allgather",
            }  # fmt: skip
            job.close()
    with pytest.raises(BadInput, match=r"'bag\.weight' has sparse ones"):
        laconic.compress(DistributedDataParallel(_Model()), "topk(0.1)", momentum=0.9)
    for sparse in (True, False):  # in a flat buffer a sparse gradient is dense
        model = _Model(sparse)
        with laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), codec="dynamic8") as job:
            for step in range(3):
                job.optimizer.zero_grad()
                model(_words(step)).square().mean().backward()
                job.optimizer.step()
            found[f"distribute {sparse}"] = model.bag.weight.detach().clone()
    world.close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
def test_a_sparse_gradient_is_the_mean_that_ddp_gives(size: int) -> None:
    for found in run_local(size, _against_ddp, timeout_s=100):
        *expected, weights = found["ddp"]
        exact = found["none"][:-1]
        for ours, theirs in zip(exact, expected, strict=True):
            assert torch.equal(ours.indices(), theirs.indices())
            torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-8)
        for spec in ("dynamic8", "topk(0.1)", "powersgd(2)"):  # the first step's, before other weights differ
            assert torch.equal(found[spec][0].to_dense(), exact[0].to_dense())
            assert torch.isfinite(found[spec][-1]).all()
        torch.testing.assert_close(found["none"][-1], weights, rtol=1e-4, atol=1e-6)
        assert torch.equal(found["distribute True"], found["distribute False"])


@pytest.mark.parametrize("shape", [(7,), (5, 4, 3), (1, 6)])
@pytest.mark.parametrize("full", [False, True])
def test_rows_that_are_there_stay_there(shape: tuple[int, ...], full: bool) -> None:
    """Also where they are zero, the stream has turned dense, or a rank has none."""

    def work(transport: Transport) -> torch.Tensor:
        dims = min(2, len(shape))
        count = 0 if transport.rank == 1 else torch.tensor(shape[:dims]).prod() if full else 1
        where = torch.stack([i.reshape(-1) for i in torch.meshgrid(*map(torch.arange, shape[:dims]), indexing="ij")])
        values = torch.zeros(int(count), *shape[dims:], dtype=torch.float64)
        values.view(-1)[:1] = 3.0
        gradient = torch.sparse_coo_tensor(where[:, : int(count)], values, shape, check_invariants=True)
        finish(SparseGradient().steps(gradient, transport))
        return gradient

    for size in (1, 2, 3):
        first, *others = run_threads(size, work)
        count = int(torch.tensor(shape[: min(2, len(shape))]).prod()) if full else 1
        assert first._nnz() == count
        assert first.dtype == torch.float64
        assert float(first.to_dense().sum()) == pytest.approx(3.0 * max(1, size - 1) / size)
        assert all(torch.equal(first.to_dense(), other.to_dense()) for other in others)


def test_a_flat_buffer_takes_sparse_gradients() -> None:
    bag = nn.EmbeddingBag(10, 3, sparse=True)
    flat = FlatGradients([bag.weight], 1 << 20, lambda p: False)
    for _ in range(2):  # the second is added to the first
        bag(torch.tensor([[1, 1, 4]])).sum().backward()
    assert bag.weight.grad is flat.buffers[0].views[0]
    torch.testing.assert_close(bag.weight.grad[:, 0], torch.tensor([0, 4 / 3, 0, 0, 2 / 3, 0, 0, 0, 0, 0]))
    flat.close()


TIMEOUT_S = 3.0


def _broken_off(how: str) -> dict[str, Any]:
    """Two steps that go well, then rank 1 stops in the middle of the third."""
    dist.init_process_group("gloo")
    world = laconic.init(timeout_s=TIMEOUT_S)
    weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    state = CompressionState("dynamic8", [(str(i), w) for i, w in enumerate(weights)], Options(world=world))

    def bucket(index: int) -> Any:
        return state.stream.submit(torch.ones(4096), index, [weights[index]], last=index == 1)

    for _ in range(2):
        for future in [bucket(0), bucket(1)]:
            assert torch.isfinite(future.wait()).all()
    state.stream.raise_first()
    begun, texts = time.monotonic(), []
    stops = world.rank == 1
    futures = [] if stops and how == "peer" else [bucket(0)] if stops and how == "bucket" else [bucket(0), bucket(1)]
    for future in futures:
        try:
            spoilt = bool(future.wait().isnan().all())
            state.stream.raise_first()
            texts.append(f"no error, spoilt: {spoilt}")
        except LaconicError as error:
            texts.append(f"{type(error).__name__}: {error}")
    found = {"seconds": time.monotonic() - begun, "texts": texts}
    if stops and how == "bucket":
        try:
            late = bucket(1).wait()  # backward goes on after all: too late for this step
            state.stream.raise_first()
        except LaconicError as error:
            found["late"] = f"{type(error).__name__}: {error}, {bool(late.isnan().all())}"
    if stops and how == "peer":
        time.sleep(TIMEOUT_S + 1)
    state.close()
    world.close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("how", ["bucket", "peer"])
def test_every_future_ends_in_time(how: str) -> None:
    """A bucket that never comes, on the rank that waits for it and on the others; a peer that stops calling."""
    waiting, stopped = run_local(2, _broken_off, (how,), timeout_s=60)
    assert waiting["seconds"] < TIMEOUT_S + 4
    for text in waiting["texts"]:
        assert text.startswith(("CollectiveTimeout: [rank 0/2]", "PeerLost: [rank 0/2]")), text
        assert "round 1 of" in text
        assert "peer 1" in text
    assert len(waiting["texts"]) == 2
    if how == "bucket":
        (text,) = stopped["texts"]
        expected = "CollectiveTimeout: [rank 1/2] step 2: bucket 0 is held for the next one, which did not come in 3 s"
        assert text.startswith(expected)
        assert stopped["seconds"] < TIMEOUT_S + 1
        assert stopped["late"].startswith(expected)
        assert stopped["late"].endswith("True")
