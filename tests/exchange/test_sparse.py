"""Sparse all-reduces: the exact sum, the same bits on all ranks, whatever the patterns, the ranks and the wire do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.codecs import codec
from laconic.errors import BadInput, Mismatch, PayloadError, UnknownName
from laconic.exchange import sparse_stream as wire
from laconic.exchange.costs import SPARSE_OR_DENSE, cheapest_sum, sparse_seconds
from laconic.exchange.sparse import sparse_all_reduce
from laconic.exchange.sparse_stream import SparseStream
from laconic.schedules import Link
from laconic.transports.base import Call, Incoming, Outgoing, Posted, Transport
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from reference import index_packing, sparse_sum

PATTERNS = ("uniform", "empty", "full", "disjoint", "identical", "clustered", "one empty", "crossing")
EXACT = ("ssar_recursive_doubling", "ssar_split_allgather", "dsar", "ring")
Pairs = tuple[np.ndarray, np.ndarray]


def make_streams(pattern: str, world_size: int, numel: int, seed: int) -> list[Pairs]:
    """One (indices, values) per rank."""
    random = np.random.default_rng(seed)
    everything = np.arange(numel)
    some = max(1, numel // 10) if numel else 0
    same = np.sort(random.choice(numel, some, replace=False)) if numel else everything
    start = int(random.integers(0, numel - some + 1)) if numel else 0
    streams = []
    for rank in range(world_size):
        places = {
            "uniform": lambda: np.sort(random.choice(numel, random.integers(0, numel // 3 + 1), replace=False)),
            "empty": lambda: everything[:0],
            "full": lambda: everything,
            "disjoint": lambda rank=rank: everything[rank::world_size],
            "identical": lambda: same,
            "clustered": lambda: everything[start : start + some],
            "one empty": lambda rank=rank: everything[:0] if rank == world_size - 1 else same,
            "crossing": lambda: np.flatnonzero(random.random(numel) < 0.9),  # two of them are 99 % of all
        }[pattern]()
        streams.append((places, (random.standard_normal(places.size) * 100).astype(np.float32)))
    return streams


def reduce_all(streams: Sequence[Pairs], numel: int, algorithm: str, **options: object) -> list[SparseStream]:
    def work(transport: Transport) -> SparseStream:
        indices, values = streams[transport.rank]
        before = indices.copy(), values.copy()
        total = sparse_all_reduce(SparseStream.of(indices, values, numel), transport, algorithm, **options)
        assert np.array_equal(before[0], indices)
        assert np.array_equal(before[1], values)
        sent, received = transport.counters.sent_nbytes, transport.counters.received_nbytes
        counts.append((sum(sent.values()), sum(received.values())))
        return total

    counts: list[tuple[int, int]] = []
    totals = run_threads(len(streams), work)
    assert sum(sent for sent, _ in counts) == sum(received for _, received in counts)
    return totals


def assert_same_bits(totals: Sequence[SparseStream]) -> None:
    first = totals[0]
    for total in totals[1:]:
        assert total.dense == first.dense
        assert first.indices is None or np.array_equal(first.indices, total.indices)
        assert first.values.tobytes() == total.values.tobytes()


def expected(streams: Sequence[Pairs], numel: int, algorithm: str) -> np.ndarray:
    order = sparse_sum.by_tree if algorithm == "ssar_recursive_doubling" else sparse_sum.by_rank
    return order(streams, numel)


@pytest.mark.parametrize("algorithm", EXACT[:3])
@pytest.mark.parametrize("world_size", range(1, 10))
def test_the_sum_is_exact_and_the_same_everywhere(world_size: int, algorithm: str) -> None:
    for pattern in PATTERNS:
        for numel in (257, 5):
            streams = make_streams(pattern, world_size, numel, seed=world_size)
            totals = reduce_all(streams, numel, algorithm)
            assert_same_bits(totals)
            assert np.array_equal(totals[0].to_dense().numpy(), expected(streams, numel, algorithm)), pattern
            if not totals[0].dense:
                assert totals[0].indices is not None
                assert totals[0].indices.tolist() == sparse_sum.union(streams)


@settings(max_examples=60)
@given(
    world_size=st.integers(1, 9),
    numel=st.integers(0, 400),
    pattern=st.sampled_from(PATTERNS),
    algorithm=st.sampled_from(("auto", *SPARSE_OR_DENSE)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ranks_sizes_and_patterns(world_size: int, numel: int, pattern: str, algorithm: str, seed: int) -> None:
    streams = make_streams(pattern, world_size, numel, seed)
    totals = reduce_all(streams, numel, algorithm)
    assert_same_bits(totals)
    dense = totals[0].to_dense().numpy()
    if algorithm in EXACT[:3]:
        assert np.array_equal(dense, expected(streams, numel, algorithm))
    else:  # the dense algorithms have orders of their own: each of P − 1 additions is off by half a unit at most
        absolute = sparse_sum.by_rank([(i, np.abs(v)) for i, v in streams], numel)
        bound = world_size * np.finfo(np.float32).eps * absolute
        assert (np.abs(dense - sparse_sum.by_rank(streams, numel)) <= bound).all()


@pytest.mark.parametrize("algorithm", EXACT[:2])
def test_streams_turn_dense_once_that_is_smaller(algorithm: str) -> None:
    numel = 1000
    sparse = reduce_all([(np.arange(r, numel, 10), np.ones(100, np.float32)) for r in range(4)], numel, algorithm)
    assert not sparse[0].dense
    assert sparse[0].count == 400
    dense = reduce_all([(np.arange(r, numel, 4), np.ones(250, np.float32)) for r in range(4)], numel, algorithm)
    assert dense[0].dense
    assert dense[0].to_dense().tolist() == [1.0] * numel


@pytest.mark.parametrize("numel", [1, 7, 64, 1000])
def test_the_switch_is_where_the_formula_puts_it(numel: int) -> None:
    for count in range(numel + 1):
        index_nbytes = index_packing.nbytes(numel, count)  # |H|·c_idx
        assert wire.is_dense(count, numel) == (4 * count + index_nbytes > 4 * numel), count
        stream = SparseStream.of(np.arange(count), np.ones(count), numel)
        assert stream.dense == wire.is_dense(count, numel)
        message = stream.pack()
        assert message.numel() == wire.message_nbytes(count, numel) <= wire.max_nbytes(numel)
        back = wire.unpack(wire.open_message(message, numel))
        assert torch.equal(back.to_dense(), stream.to_dense())


def test_what_cancels_stays_and_non_finite_values_travel() -> None:
    pairs = [(np.array([1, 3]), np.array([2.0, np.inf], np.float32)), (np.array([1, 3]), np.array([-2.0, 1.0]))]
    for algorithm in EXACT[:3]:
        totals = reduce_all(pairs, 50, algorithm)
        assert_same_bits(totals)
        assert totals[0].to_dense()[:4].tolist() == [0.0, 0.0, 0.0, float("inf")]
        assert totals[0].dense or totals[0].count == 2


@pytest.mark.parametrize("spec", ["qsgd(4)", "dynamic8", "topk(0.1)", "none"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_dsar_with_a_codec_gives_all_ranks_what_the_owner_wrote(world_size: int, spec: str) -> None:
    numel, chosen = 1000, codec(spec)
    streams = make_streams("uniform", world_size, numel, seed=3)
    exact = torch.from_numpy(sparse_sum.by_rank(streams, numel))
    totals = reduce_all(streams, numel, "dsar", codec=chosen, step=5)
    assert_same_bits(totals)
    edges = [numel * r // world_size for r in range(world_size + 1)]
    for rank in range(world_size):
        chunk = exact[edges[rank] : edges[rank + 1]].contiguous()
        decoded = chosen.decode(chosen.encode(chunk, step=5 * world_size + rank), chunk.numel())
        assert torch.equal(totals[0].to_dense()[edges[rank] : edges[rank + 1]], decoded)
    assert_same_bits([totals[0], *reduce_all(streams, numel, "dsar", codec=chosen, step=5)])


def test_a_codec_that_refuses_infinity_makes_its_chunk_nan() -> None:
    streams = [(np.array([0, 9]), np.array([1.0, np.inf], np.float32)), (np.array([0]), np.ones(1, np.float32))]
    total = reduce_all(streams, 10, "dsar", codec=codec("dynamic8"))[1].to_dense()
    assert torch.isfinite(total[:5]).all()
    assert torch.isnan(total[5:]).all()


class _Tampering(Transport):
    """A transport that changes what one rank receives from one peer."""

    def __init__(self, inner: Transport, peer: int, change: str) -> None:
        super().__init__(inner.rank, inner.world_size, inner.timeout_s)
        self.inner, self.peer, self.change = inner, peer, change
        self.counters = inner.counters

    def enter(self, call: Call) -> Call:
        self.inner.enter(call)
        return super().enter(call)

    def leave(self, call: Call) -> None:
        super().leave(call)
        self.inner.leave(call)

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        return _TamperedRound(self, self.inner.post(call, sends, recvs, round), recvs)

    def close(self) -> None:
        self.inner.close()


class _TamperedRound(Posted):
    def __init__(self, owner: _Tampering, posted: Posted, recvs: Sequence[Incoming]) -> None:
        self.owner, self.posted, self.recvs = owner, posted, recvs

    def received(self, index: int) -> torch.Tensor:
        data = self.posted.received(index)
        if self.recvs[index].peer != self.owner.peer:
            return data
        if self.owner.change == "cut":
            return data[: data.numel() // 2]
        data = data.clone()
        data[{"flip": -1, "numel": 4, "kind": 16, "count": 24, "index": 33}[self.owner.change]] ^= 4
        return data

    def sent(self) -> None:
        self.posted.sent()


@pytest.mark.parametrize("change", ["flip", "cut", "numel", "kind", "count", "index"])
@pytest.mark.parametrize("algorithm", EXACT[:3])
def test_a_corrupt_message_is_an_error_on_every_rank_and_nobody_hangs(algorithm: str, change: str) -> None:
    def work(transport: Transport) -> str:
        bad = _Tampering(transport, 0, change) if transport.rank == 1 else transport
        try:
            sparse_all_reduce(SparseStream.of([1, 30, 60], [1.0, 2.0, 3.0], 99), bad, algorithm)
        except PayloadError as error:
            return str(error)
        return ""

    texts = run_threads(4, work, timeout_s=10)
    assert texts[1].startswith(f"[rank 1/4] {algorithm} sparse all_reduce, round 1 of 2: from peer 0: ")
    # Rank 1 reads rank 0's message in the first round, so all that comes from rank 1 later is spoilt. Recursive
    # doubling has rank 0 meet rank 2 in the last round, before either could hear of it.
    heard = (1, 3) if algorithm == "ssar_recursive_doubling" else range(4)
    assert [rank for rank in range(4) if texts[rank]] == list(heard)
    assert all("could not read" in texts[rank] for rank in heard if rank != 1)


@settings(max_examples=200)
@given(st.integers(0, 500), st.integers(0, 2**32 - 1), st.data())
def test_no_change_of_a_message_goes_unnoticed(numel: int, seed: int, data: st.DataObject) -> None:
    ((indices, values),) = make_streams("uniform", 1, numel, seed)
    message = SparseStream.of(indices, values, numel).pack()
    bad = message.clone()
    bad[data.draw(st.integers(0, message.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    longer = torch.cat([bad, torch.zeros(5000, dtype=torch.uint8)])  # as an engine that does not tell the length
    for wrong in (bad, longer, message[: data.draw(st.integers(0, message.numel() - 1))]):
        with pytest.raises(PayloadError):
            wire.unpack(wire.open_message(wrong, numel))
    assert wire.open_message(torch.cat([message, longer]), numel).nbytes == message.numel()


def test_a_sealed_lie_is_found() -> None:
    """Whoever can write a valid checksum still cannot make a stream with indices out of order or out of range."""
    message = SparseStream.of([3, 5], [1.0, 2.0], 20).pack()
    for byte in range(256):
        forged = message.clone()
        forged[wire.HEAD_NBYTES] = byte
        wire.seal(forged, wire.SPARSE, 2, 20)
        try:
            found = wire.unpack(wire.open_message(forged, 20)).indices
        except PayloadError:
            continue
        assert found is not None
        assert 0 <= found[0] < found[1] < 20
    for kind, count in ((wire.SPARSE, 21), (wire.DENSE, 2), (wire.SPOILT, 1), (7, 0), (wire.CODED, 10**6)):
        with pytest.raises(PayloadError, match="cannot be"):
            wire.open_message(wire.seal(message.clone(), kind, count, 20), 20)


@pytest.mark.parametrize(
    ("indices", "values", "numel", "text"),
    [
        ([1, 1], [1.0, 2.0], 5, "increasing"),
        ([2, 1], [1.0, 2.0], 5, "increasing"),
        ([-1, 1], [1.0, 2.0], 5, "increasing"),
        ([1, 5], [1.0, 2.0], 5, "from 0 to 4"),
        ([1], [1.0, 2.0], 5, "as many values"),
        ([0.5], [1.0], 5, "integers"),
        ([], [], -1, "numel"),
    ],
)
def test_wrong_streams_are_refused(indices: list[int], values: list[float], numel: int, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        SparseStream.of(indices, values, numel)


def test_wrong_choices_are_refused() -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(UnknownName, match="did you mean 'dsar'"):
            sparse_all_reduce(SparseStream.of([0], [1.0], 5), transport, "dsra")
        with pytest.raises(BadInput, match="only dsar takes a codec"):
            sparse_all_reduce(SparseStream.of([0], [1.0], 5), transport, "ring", codec=codec("qsgd(4)"))
        with pytest.raises(BadInput, match="contiguous float32"):
            SparseStream.of([0], [1.0], 5).to_dense(torch.zeros(4))

    run_threads(1, work)


def test_ranks_that_disagree_are_told() -> None:
    def work(transport: Transport) -> None:
        sparse_all_reduce(SparseStream.of([0], [1.0], 5 + transport.rank), transport, "dsar")

    with pytest.raises(Mismatch, match="6 × float32"):
        run_threads(2, work, timeout_s=5)


@given(
    st.integers(1, 64), st.floats(0, 1), st.integers(1, 10**8), st.floats(1e-12, 1e-6), st.floats(0, 1e-2)
)
def test_auto_takes_the_least_predicted(
    world_size: int, density: float, numel: int, s_per_byte: float, latency_s: float
) -> None:
    link, count = Link(latency_s, s_per_byte), int(density * numel)
    seconds = sparse_seconds(world_size, count, numel, link)
    assert set(seconds) == set(SPARSE_OR_DENSE)
    assert all(value >= 0 for value in seconds.values())
    assert seconds[cheapest_sum(world_size, count, numel, link)] == min(seconds.values())


def test_auto_goes_from_sparse_to_dense() -> None:
    link = Link(latency_s=50e-6, s_per_byte=8e-9, overhead_s=20e-6, gap_s=20e-6)
    picks = [cheapest_sum(8, int(10**7 * d), 10**7, link) for d in np.geomspace(1e-6, 1, 40)]
    assert list(dict.fromkeys(picks)) == ["ssar_recursive_doubling", "ssar_split_allgather", "dsar", "native"]
    assert cheapest_sum(8, 10**6, 10**7, link, codec("qsgd(4)")) == "dsar"


def _on_gloo() -> str:
    with laconic.init(timeout_s=30) as world:
        for pattern in ("uniform", "one empty", "crossing"):
            for algorithm in (*SPARSE_OR_DENSE, "auto"):
                streams = make_streams(pattern, world.world_size, 3000, seed=1)
                total = sparse_all_reduce(SparseStream.of(*streams[world.rank], 3000), world.transport, algorithm)
                dense = total.to_dense()
                if algorithm in EXACT[:3]:
                    assert np.array_equal(dense.numpy(), expected(streams, 3000, algorithm)), (pattern, algorithm)
                everyone = laconic.all_gather(dense, group=world)
                assert all(torch.equal(everyone[0].view(torch.int32), other.view(torch.int32)) for other in everyone)
        counters = world.transport.counters
        moved = [counters.total_sent_nbytes, sum(counters.received_nbytes.values())]
        sent, received = laconic.all_gather(torch.tensor(moved), group=world).sum(0).tolist()
        assert sent == received
        return "fine"


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [3, 4])
def test_gloo_ranks(world_size: int) -> None:
    assert run_local(world_size, _on_gloo, timeout_s=100) == ["fine"] * world_size
