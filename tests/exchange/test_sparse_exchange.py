"""Selected values by sparse all-reduces: the bits of gather on every rank, with residuals, NaN and records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput
from laconic.exchange.coded import Channel, CodedExchange, sizes
from laconic.exchange.costs import GUESS, SPARSE, cheapest_coded
from laconic.exchange.residuals import Residual
from laconic.exchange.sparse_exchange import SparseExchange
from laconic.schedules.link import Link
from laconic.transports.base import Transport
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from tests.reference import sparse_sum

EXACT = laconic.codec("none")


def _values(rank: int, numel: int, step: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def _largest(x: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:count])


@pytest.mark.parametrize("algorithm", SPARSE)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_mean_of_what_was_selected_and_the_rest_is_kept(world_size: int, algorithm: str) -> None:
    """Against dense NumPy: error feedback by hand, and sums in the order that the algorithm promises."""
    numel, count, few = 700, 70, 5

    def work(transport: Transport) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        residual = Residual(numel)
        channels = [Channel(torch.empty(numel), laconic.codec(f"topk({count})"), residual)]
        channels.append(Channel(torch.empty(few), EXACT))
        exchange = SparseExchange(channels, transport, algorithm=algorithm, divisor=world_size)
        means, exact = [], []
        for step in range(4):
            channels[0].buffer = _values(transport.rank, numel, step)
            channels[1].buffer = _values(transport.rank, few, step)
            exchange.run(step)
            means.append(channels[0].buffer)
            exact.append(channels[1].buffer)
        return means, exact, residual.total()

    results = run_threads(world_size, work)
    order = sparse_sum.by_tree if algorithm == "ssar_recursive_doubling" else sparse_sum.by_rank
    left = [np.zeros(numel, np.float32) for _ in range(world_size)]
    for step in range(4):
        streams = []
        for rank in range(world_size):
            left[rank] = left[rank] + _values(rank, numel, step).numpy()
            chosen = _largest(left[rank], count)
            streams.append((chosen, left[rank][chosen] / np.float32(world_size)))
            left[rank][chosen] = 0.0
        for means, _, _ in results:
            np.testing.assert_array_equal(means[step].numpy(), order(streams, numel))
        ones = [(range(few), (_values(rank, few, step) / world_size).numpy()) for rank in range(world_size)]
        for _, exact, _ in results:
            np.testing.assert_array_equal(exact[step].numpy(), order(ones, few))
    for rank, (_, _, kept) in enumerate(results):
        np.testing.assert_array_equal(kept.numpy(), left[rank])


@pytest.mark.parametrize("spec", ["topk(0.05)", "topk(0.6)", "topk(0.05)+qsgd(4)", "randomk(0.1)"])
def test_it_is_gather_to_the_bit(spec: str) -> None:
    def work(transport: Transport) -> None:
        kinds: Any = (CodedExchange, "gather"), (SparseExchange, "ssar_split_allgather"), (SparseExchange, "dsar")
        found = []
        for kind, algorithm in kinds:
            channels = [Channel(_values(transport.rank, 900), laconic.codec(spec), Residual(900))]
            channels.append(Channel(_values(transport.rank, 30), EXACT))
            kind(channels, transport, algorithm=algorithm, divisor=3).run(step=2)
            found.append(torch.cat([*(c.buffer for c in channels), channels[0].encoder.total()]))  # type: ignore[union-attr]
        # gather divides an exact channel's sum after adding, not before
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
        assert torch.equal(found[1][:900], found[0][:900])
        assert torch.equal(found[2], found[1])

    run_threads(3, work)


@pytest.mark.parametrize("algorithm", SPARSE)
def test_infinity_on_one_rank_is_nan_on_all_and_passes(algorithm: str) -> None:
    def work(transport: Transport) -> list[bool]:
        channels = [Channel(_values(r, 400), laconic.codec("topk(0.1)"), Residual(400)) for r in (1, 2)]
        exchange, finite = SparseExchange(channels, transport, algorithm=algorithm), []
        for step in range(2):
            for number, channel in enumerate(channels):
                channel.buffer = _values(number, 400, step)
            if step == 0 and transport.rank == 1:
                channels[0].buffer[17] = float("inf")
            exchange.run(step)
            finite += [bool(channel.buffer.isfinite().all()) for channel in channels]
            assert step or bool(channels[0].buffer.isnan().all())
        return finite

    assert run_threads(3, work) == [[False, True, True, True]] * 3


def test_when_it_is_chosen() -> None:
    def pick(spec: str, world_size: int, link: Link = GUESS, once: bool = False, numel: int = 10**6) -> str:
        channels = [Channel(torch.empty(numel, device="meta"), laconic.codec(spec)), Channel(torch.empty(99), EXACT)]
        return cheapest_coded(sizes(channels), world_size, link, once=once)

    # A rank that must know what it sent cannot go by direct; the more the selections overlap, the less gather pays.
    assert pick("topk(0.25)", 8, once=True) in SPARSE
    assert pick("topk(0.25)", 2, once=True) == "gather"
    assert pick("topk(0.001)", 8, once=True) == "gather"
    # Few values on many ranks: log P rounds instead of P messages, where a message costs much.
    busy = Link(latency_s=50e-6, s_per_byte=1e-9, overhead_s=100e-6, gap_s=100e-6)
    assert pick("topk(0.0001)", 512, busy) == "ssar_recursive_doubling"
    assert pick("topk(0.0001)", 8, busy) == "gather"
    assert pick("threshold(0.1)", 8, once=True) == "gather"  # ranks select different numbers
    assert pick("dynamic8", 64) == "direct"


def test_wrong_use() -> None:
    channels = [Channel(torch.ones(9), laconic.codec("dynamic8"))]
    with pytest.raises(BadInput, match="sums what codecs such as topk select, got dynamic8"):
        run_threads(1, lambda transport: SparseExchange(channels, transport, algorithm="dsar"))


def _ranks(algorithm: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    state = laconic.compress(ddp, "topk(0.05)", algorithm=algorithm, message_nbytes=1, exempt=["0.weight"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):  # several buckets are under way at once
        ddp.zero_grad()
        ddp(torch.randn(16, 64, generator=generator)).square().mean().backward()
    gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
    everyone = laconic.all_gather(gradients, algorithm="ring")
    found = {
        "alike": all(torch.equal(row, everyone[0]) for row in everyone),
        "gradients": gradients,
        "algorithms": {record.algorithm for record in state.records},
        "buckets": len({record.bucket for record in state.records}),
        "text": state.explain(),
    }
    state.close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_compress_by_a_sparse_all_reduce() -> None:
    by_gather, sparse = (run_local(3, _ranks, (name,), timeout_s=100)[0] for name in ("gather", SPARSE[1]))
    assert sparse["alike"]
    assert sparse["algorithms"] == {SPARSE[1], "direct"}  # the first layer goes as it is
    assert sparse["buckets"] > 1
    assert SPARSE[1] in sparse["text"]
    torch.testing.assert_close(sparse["gradients"], by_gather["gradients"], rtol=1e-5, atol=1e-7)
