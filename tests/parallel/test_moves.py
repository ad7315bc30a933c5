"""Every move is linear, and its adjoint is exact: ⟨Ax, y⟩ = ⟨x, A*y⟩."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.parallel.boundary import Boundary, Cut, predicted_nbytes
from laconic.parallel.moves import Copy, Fold, Gather, Halo, Move, Reduce, Scatter, SendMove, Shift, Spread, Turn, even
from laconic.transports.threads import run_threads
from laconic.transports.world import World

Shape = tuple[int, ...]


class Case:
    """A move with the shapes it takes and gives on each rank, and whether those are whole values."""

    def __init__(self, make: Callable[[Cut], Move], takes: list[Shape], gives: list[Shape], whole: str = "") -> None:
        self.make, self.takes, self.gives, self.whole = make, takes, gives, whole


def cases(ranks: int, n: int, m: int) -> dict[str, Case]:
    rows, columns = even(n, ranks), even(m, ranks)
    whole, tall, wide = [(n, m)] * ranks, [(size, m) for size in rows], [(n, size) for size in columns]
    needs = [(max(0, sum(rows[:r]) - 2), min(n, sum(rows[: r + 1]) + 1)) for r in range(ranks)]
    widened = [(stop - start, m) for start, stop in needs]
    moved = [tall[(rank - 1) % ranks] for rank in range(ranks)]
    return {
        "copy": Case(Copy, whole, whole, "in"),
        "reduce": Case(Reduce, whole, whole, "out"),
        "gather": Case(lambda cut: Gather(cut, 0, rows), tall, whole, "out"),
        "scatter": Case(lambda cut: Scatter(cut, 0, rows), whole, tall, "in"),
        "spread": Case(lambda cut: Spread(cut, 1, columns), wide, whole),
        "fold": Case(lambda cut: Fold(cut, 1, columns), whole, wide),
        "turn": Case(lambda cut: Turn(cut, 0, rows, 1, columns), tall, wide),
        "shift": Case(lambda cut: Shift(cut, 1, shapes=tall), tall, moved),
        "halo": Case(lambda cut: Halo(cut, 0, rows, needs), tall, widened),
        "send": Case(lambda cut: SendMove(cut, 0, ranks - 1, (n, m)), whole, whole),
    }


def product(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one * two).sum())


@pytest.mark.parametrize("name", sorted(cases(2, 4, 4)))
@settings(max_examples=8)
@given(ranks=st.integers(1, 4), n=st.integers(4, 9), m=st.integers(4, 9), seed=st.integers(0, 99))
def test_adjoint(name: str, ranks: int, n: int, m: int, seed: int) -> None:
    case = cases(ranks, n, m)[name]
    if name == "send" and ranks == 1:
        return
    torch.manual_seed(seed)
    xs = [torch.randn(shape, dtype=torch.float64) for shape in case.takes]
    ys = [torch.randn(shape, dtype=torch.float64) for shape in case.gives]
    xs = xs[:1] * ranks if case.whole == "in" else xs
    ys = ys[:1] * ranks if case.whole == "out" else ys

    def work(transport):  # type: ignore[no-untyped-def]
        move = case.make(Cut(World(transport), Boundary.of(None), name))
        x = xs[transport.rank].clone().requires_grad_()
        y = move(x)
        assert y.shape == case.gives[transport.rank]
        y.backward(ys[transport.rank])
        return y.detach(), x.grad

    moved = run_threads(ranks, work)
    left = [product(y, other) for (y, _), other in zip(moved, ys, strict=True)]
    right = [product(x, back) for x, (_, back) in zip(xs, moved, strict=True)]
    if name == "send":  # what the other ranks bring counts for nothing
        right = right[:1]
    lhs = left[0] if case.whole == "out" else sum(left)
    rhs = right[0] if case.whole == "in" else sum(right)
    assert lhs == pytest.approx(rhs, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("codec", ["none", "fp16", "dynamic8", "qsgd(4)"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_values_stay_alike_and_bytes_are_as_predicted(codec: str, ranks: int) -> None:
    def work(transport):  # type: ignore[no-untyped-def]
        cut = Cut(World(transport), Boundary.of((codec, codec)), "layer")
        torch.manual_seed(transport.rank)
        x = torch.randn(6, 5)
        before = transport.counters.total_sent_nbytes
        total, gathered = Reduce(cut)(x), Gather(cut, 0, [6] * ranks)(x)
        return total, gathered, transport.counters.total_sent_nbytes - before, cut.traffic.total_nbytes, cut

    results = run_threads(ranks, work)
    for total, gathered, sent, counted, _ in results:
        assert torch.equal(total, results[0][0])
        assert torch.equal(gathered, results[0][1])
        assert sent == counted
        assert total.shape == (6, 5)
    pieces = [30] if ranks == 2 else [10] * 4
    chosen = results[0][4].boundary.forward
    expected = sum(predicted_nbytes(chosen, piece) for piece in pieces) + (ranks - 1) * predicted_nbytes(chosen, 30)
    assert results[0][3] == expected


def test_what_a_codec_refuses_arrives_as_nan() -> None:
    def work(transport):  # type: ignore[no-untyped-def]
        cut = Cut(World(transport), Boundary.of("dynamic8"), "layer")
        return Gather(cut, 0, [2, 2])(torch.tensor([float(transport.rank), float("inf") * transport.rank]))

    for gathered in run_threads(2, work):
        assert gathered.isnan().tolist() == [True, True, True, True]


def test_messages_between_two() -> None:
    def work(transport):  # type: ignore[no-untyped-def]
        cut = Cut(World(transport), Boundary.of("fp16"), "stage 1")
        if transport.rank == 0:
            for crossing in [cut.send("forward", torch.full((3,), float(i)), 1) for i in range(4)]:
                crossing.wait()
            return cut.traffic.total_nbytes
        waiting = [cut.recv("forward", (3,), torch.float32, 0) for _ in range(4)]
        return [crossing.wait().tolist() for crossing in waiting]

    sent, came = run_threads(2, work)
    assert came == [[float(i)] * 3 for i in range(4)]
    assert sent == 4 * (16 + 6)
