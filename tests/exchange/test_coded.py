"""Compressed all-reduce: the same bits on every rank, the sum of what was sent, feedback, poison, faults."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic import schedules
from laconic.codecs.poison import is_poison, poison
from laconic.errors import BadInput, PayloadError, UnknownName
from laconic.exchange import coded_plan
from laconic.exchange.coded import Channel, CodedExchange, MessagePool, pack, unpack
from laconic.exchange.residuals import Residual, mode_for
from laconic.transports.base import Transport
from laconic.transports.threads import run_threads
from laconic.transports.world import World

FORMS = [*schedules.names("all_reduce"), "gather"]
SPECS = ["none", "dynamic8", "onebit", "qsgd(4)", "topk(0.1)+qsgd(8)", "topk(0.05)+entropy"]


def _run(channels: list[Channel], transport: Transport, form: str, step: int = 0, **options: object) -> None:
    if form == "gather":
        CodedExchange(channels, transport, algorithm="gather").run(step)
    else:
        CodedExchange(channels, transport, algorithm=form, **options).run(step)  # type: ignore[arg-type]


def _values(world_size: int, numel: int, seed: int = 0) -> list[torch.Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(seed * 100 + r)) for r in range(world_size)]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=16)
@given(
    world_size=st.integers(1, 7),
    numel=st.sampled_from([0, 1, 5, 700]),
    spec=st.sampled_from(SPECS),
    segment=st.sampled_from([4 << 20, 200]),
)
def test_all_ranks_end_with_the_same_bits(form: str, world_size: int, numel: int, spec: str, segment: int) -> None:
    xs = _values(world_size, numel)

    def work(transport: Transport) -> torch.Tensor:
        mine = xs[transport.rank]
        coded, exact = Channel(mine.clone(), laconic.codec(spec)), Channel(mine[:3].clone(), EXACT)
        _run([coded, exact], transport, form)
        torch.testing.assert_close(exact.buffer, torch.stack(xs).sum(0)[:3])
        return coded.buffer

    with mock.patch.object(coded_plan, "SEGMENT_NBYTES", segment):
        results = run_threads(world_size, work, timeout_s=90.0)
    assert all(torch.equal(result, results[0]) for result in results)
    if spec == "none":
        torch.testing.assert_close(results[0], torch.stack(xs).sum(0))


EXACT = laconic.codec("none")


@pytest.mark.parametrize(("form", "messages"), [("direct", 4), ("gather", 3)])
def test_exchanges_one_after_the_other_share_the_memory_of_their_messages(form: str, messages: int) -> None:
    """A rank of three has two chunks and its own twice under way at most, or its payload and two others."""

    def work(transport: Transport) -> tuple[int, int]:
        pool = MessagePool()
        for _ in range(3):
            channel = Channel(torch.randn(3000), laconic.codec("dynamic8"))
            CodedExchange([channel], transport, algorithm=form, pool=pool).run()
        return len(pool._free), sum(block.numel() for block in pool._free)

    size = laconic.codec("dynamic8").max_nbytes(1000 if form == "direct" else 3000)
    for blocks, nbytes in run_threads(3, work, timeout_s=90.0):
        assert blocks == messages
        assert nbytes <= messages * (size + 64)


@pytest.mark.parametrize("form", FORMS)
def test_a_long_channel_takes_the_memory_of_one_segment(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten segments of 1000 values: the messages of each are in the memory of those of the one before."""
    codec = laconic.codec("dynamic8")
    monkeypatch.setattr(coded_plan, "SEGMENT_NBYTES", codec.max_nbytes(1000))

    def most(numel: int) -> int:
        def work(transport: Transport) -> int:
            pool = MessagePool()
            CodedExchange([Channel(torch.randn(numel), codec)], transport, algorithm=form, pool=pool).run()
            return sum(block.numel() for block in pool._free)

        return max(run_threads(3, work, timeout_s=90.0))

    assert most(10_000) <= 1.05 * most(1_000) + 64


def test_gather_is_exactly_the_sum_of_what_was_sent() -> None:
    xs, codec = _values(4, 1000), laconic.codec("topk(0.1)+qsgd(4)")
    expected = torch.zeros(1000)
    for rank, x in enumerate(xs):
        codec.decode_add(codec.encode(x, step=3 * 4 + rank), expected)

    def work(transport: Transport) -> torch.Tensor:
        channel = Channel(xs[transport.rank].clone(), codec)
        CodedExchange([channel], transport, algorithm="gather").run(3)
        return channel.buffer

    assert all(torch.equal(result, expected) for result in run_threads(4, work))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spec", ["dynamic8", "onebit", "topk(0.1)", "topk(0.1)+qsgd(8)"])
@pytest.mark.parametrize("segment", [4 << 20, 150])
def test_feedback_sends_in_the_end_what_was_left_out(
    form: str, spec: str, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Σ sent + everything owed by all ranks = Σ inputs: nothing is lost on any leg."""
    monkeypatch.setattr(coded_plan, "SEGMENT_NBYTES", segment)
    xs, steps, codec = _values(4, 400), 8, laconic.codec(spec)

    def work(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        channel = Channel(torch.empty(0), codec, Residual(400, "full"))
        total = torch.zeros(400, dtype=torch.float64)
        for step in range(steps):
            channel.buffer = xs[transport.rank] * (step + 1)
            _run([channel], transport, form, step)
            total += channel.buffer
        assert isinstance(channel.encoder, Residual)
        return total, channel.encoder.total().double()

    results = run_threads(4, work)
    owed = torch.stack([debt for _, debt in results]).sum(0)
    inputs = torch.stack(xs).sum(0).double() * sum(range(1, steps + 1))
    torch.testing.assert_close(results[0][0] + owed, inputs, rtol=0, atol=1e-3)


def test_two_encodings_whatever_the_world() -> None:
    """direct's error does not grow with P as ring's does."""
    codec = laconic.codec("linear8")

    def error(form: str, world_size: int) -> float:
        xs = _values(world_size, 4000)

        def work(transport: Transport) -> torch.Tensor:
            channel = Channel(xs[transport.rank].clone(), codec)
            _run([channel], transport, form)
            return channel.buffer

        exact = torch.stack(xs).sum(0)
        return float((run_threads(world_size, work)[0] - exact).norm() / exact.norm())

    assert error("direct", 9) < 0.8 * error("ring", 9)


def test_inside_a_host_nothing_is_lost() -> None:
    """hierarchical with hosts: float32 inside, so two hosts of equal ranks lose what two ranks lose."""
    xs, hosts = _values(4, 500), (0, 0, 1, 1)

    def work(transport: Transport) -> torch.Tensor:
        channel = Channel(xs[transport.rank].clone(), laconic.codec("topk(0.01)"))
        CodedExchange([channel], transport, algorithm="hierarchical", hosts=hosts).run()
        return channel.buffer

    one_host = tuple(0 for _ in range(4))

    def inside(transport: Transport) -> torch.Tensor:
        channel = Channel(xs[transport.rank].clone(), laconic.codec("topk(0.01)"))
        CodedExchange([channel], transport, algorithm="hierarchical", hosts=one_host).run()
        return channel.buffer

    assert not torch.allclose(run_threads(4, work)[0], torch.stack(xs).sum(0))
    for result in run_threads(4, inside):
        torch.testing.assert_close(result, torch.stack(xs).sum(0))


@pytest.mark.parametrize("form", FORMS)
def test_infinity_on_one_rank_is_nan_on_all_and_nobody_hangs(form: str) -> None:
    def work(transport: Transport) -> tuple[bool, bool]:
        channel = Channel(torch.ones(600), laconic.codec("dynamic8"), Residual(600))
        if transport.rank == 1:
            channel.buffer[17] = float("inf")
        _run([channel], transport, form)
        poisoned = bool(channel.buffer[17].isnan())
        channel.buffer = torch.ones(600)  # the next step is sound again
        _run([channel], transport, form, 1)
        return poisoned, bool(channel.buffer.isfinite().all())

    assert run_threads(3, work, timeout_s=10) == [(True, True)] * 3


def test_feedback_modes() -> None:
    assert mode_for(laconic.codec("qsgd(4)")) == "off"
    assert mode_for(laconic.codec("topk(0.1)+qsgd(4)")) == "selection"
    assert mode_for(laconic.codec("topk(0.1)+dynamic8")) == "full"
    assert mode_for(laconic.codec("onebit")) == "full"
    selection, x = Residual(1000, "selection"), torch.randn(1000)
    codec = laconic.codec("topk(0.1)+qsgd(4)")
    out = torch.empty(codec.max_nbytes(1000), dtype=torch.uint8)
    payload = selection.encode(codec, x, (0, 0, 1000), step=0, out=out)
    chosen = torch.zeros(1000, dtype=torch.bool)
    chosen[codec.decode_sparse(payload, 1000)[0]] = True  # type: ignore[attr-defined]
    assert torch.equal(selection.total(), torch.where(chosen, torch.tensor(0.0), x))


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=5), st.integers(0, 400))
def test_messages_are_checked(sizes: list[int | None], cut: int) -> None:
    payloads = [poison(9) if size is None else torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    message = pack(payloads)
    found, nbytes = unpack(message, len(payloads))
    assert nbytes == message.numel()
    for size, sent, got in zip(sizes, payloads, found, strict=True):
        assert torch.equal(sent, got)
        assert is_poison(got, 9) == (size is None)
    shortened = message[: max(0, message.numel() - 1 - cut)]
    try:
        again, _ = unpack(shortened, len(payloads))
    except PayloadError:
        return
    for sent, got in zip(payloads, again, strict=True):  # only padding was cut
        assert torch.equal(sent, got)


def test_all_reduce_with_a_codec() -> None:
    def work(transport: Transport) -> list[float]:
        world = World(transport)
        x = torch.full((3, 50), float(transport.rank)).t()
        laconic.all_reduce(x, codec="dynamic8", group=world)
        half = laconic.all_reduce(torch.ones(10, dtype=torch.float16), "mean", codec="fp16", group=world)
        assert half.dtype == torch.float16
        with pytest.raises(UnknownName, match="gather"):
            laconic.all_reduce(x, codec="dynamic8", algorithm="native", group=world)
        with pytest.raises(BadInput, match="sum and mean of floating"):
            laconic.all_reduce(x, "max", codec="dynamic8", group=world)
        with pytest.raises(BadInput, match="works on matrices"):
            laconic.all_reduce(x, codec="powersgd(2)", group=world)
        return [x.mean().item(), half.mean().item()]

    for mean, half in run_threads(4, work):
        assert mean == pytest.approx(6.0, rel=0.02)
        assert half == 1.0
