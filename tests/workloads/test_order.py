"""The order of samples: the same everywhere under the same seed, every sample of an epoch once, whoever goes."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import BadInput
from laconic.exchange.checkpoints import Cursor
from laconic.workloads.order import EpochOrder, SampleLedger, permutation, weighted_part

# What a block meets: how many workers there are, which of them are dropped, whether it is lost, and how many steps.
BLOCK = st.tuples(st.integers(1, 7), st.sets(st.integers(0, 6)), st.booleans(), st.integers(1, 4))


@given(st.integers(0, 12), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
def test_weighted_shares_let_the_slowest_wait_least(total: int, weights: tuple[int, ...]) -> None:
    ends = [weighted_part(total, index, weights) for index in range(len(weights))]
    assert ends[0][0] == 0
    assert ends[-1][1] == total
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
    longest = max(Fraction(stop - start, weight) for (start, stop), weight in zip(ends, weights, strict=True))
    every = (sizes for sizes in itertools.product(range(total + 1), repeat=len(weights)) if sum(sizes) == total)
    assert longest == min(max(map(Fraction, sizes, weights)) for sizes in every)


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("weight", [198, 200, 202])
def test_a_member_five_times_slower_gets_a_fifth_wherever_it_is(slow: int, weight: int) -> None:
    """One sample too many would let the three others wait for half of a step."""
    weights = tuple(weight if member == slow else 1000 for member in range(4))
    sizes = [stop - start for start, stop in (weighted_part(32, index, weights) for index in range(4))]
    assert sizes == [2 if member == slow else 10 for member in range(4)]


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    seed=st.integers(0, 5),
    blocks=st.lists(BLOCK, min_size=1, max_size=30),
)
@settings(max_examples=150)
def test_every_sample_of_an_epoch_is_used_once(
    samples: int, batch: int, seed: int, blocks: list[tuple[int, set[int], bool, int]]
) -> None:
    ledger = SampleLedger(samples, batch, seed)
    used: list[int] = []
    step = 0
    while ledger.epoch < 2:
        parts, dropped, lost, steps = blocks[step % len(blocks)] if step < 200 else (1, set(), False, 1)
        step += 1
        epoch, block = ledger.epoch, ledger.block(parts, steps)
        assert [len(share) for share in block[0]] == [len(share) for share in ledger.shares(parts)]
        assert len(block) == min(steps, -(-ledger.remaining // batch))
        for shares in block:
            assert len(shares) == parts
            assert sum(map(len, shares)) <= batch
        included = [part for part in range(parts) if part not in dropped]
        if lost or not sum(len(shares[part]) for shares in block for part in included):
            continue
        state = ledger.state()
        used += [int(sample) for shares in block for part in included for sample in shares[part]]
        ledger.commit(parts, included, steps)
        again = SampleLedger(samples, batch, seed)
        again.load(state)  # a newcomer that got the state before the block commits the same
        again.commit(parts, included, steps)
        assert again.state() == ledger.state()
        if ledger.epoch != epoch:
            assert sorted(used) == list(range(samples))
            used = []
        else:
            assert len(used) == samples - ledger.remaining


@given(samples=st.integers(1, 200), batch=st.integers(1, 50), parts=st.lists(st.integers(1, 9), min_size=1))
@settings(max_examples=100)
def test_a_step_has_the_same_samples_whoever_is_there(samples: int, batch: int, parts: list[int]) -> None:
    alone, together = SampleLedger(samples, batch, 3), SampleLedger(samples, batch, 3)
    sizes = []
    step = 0
    while alone.epoch == 0:
        members = parts[step % len(parts)]
        whole = alone.shares(1)[0]
        assert torch.equal(whole, torch.cat(together.shares(members)))
        sizes.append(len(whole))
        alone.commit(1, [0])
        together.commit(members, range(members))
        step += 1
    assert len(sizes) == -(-samples // batch)
    assert max(sizes) - min(sizes) <= 1


def test_epochs_differ_and_repeat_by_seed() -> None:
    first, again, other = (SampleLedger(50, 50, seed) for seed in (1, 1, 2))
    order = first.shares(1)[0]
    assert torch.equal(order, again.shares(1)[0])
    assert not torch.equal(order, other.shares(1)[0])
    first.commit(1, [0])
    assert first.epoch == 1
    assert not torch.equal(order, first.shares(1)[0])


@pytest.mark.parametrize(("samples", "batch", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_ledgers_are_refused(samples: int, batch: int, seed: int) -> None:
    with pytest.raises(BadInput, match="dataset_size ≥ 1"):
        SampleLedger(samples, batch, seed)


class _World:
    """As much of a world as a cursor asks for."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


@given(
    samples=st.integers(1, 200), batch=st.integers(1, 50), ranks=st.integers(1, 5), seed=st.integers(0, 9),
    epochs=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_task_and_a_ledger_divide_every_epoch_alike(
    samples: int, batch: int, ranks: int, seed: int, epochs: int
) -> None:
    ledger = SampleLedger(samples, batch, seed)
    for epoch in range(epochs):
        order = EpochOrder(samples, batch, seed, epoch)
        for step in range(order.steps):
            assert ledger.epoch == epoch
            for rank, share in enumerate(ledger.shares(ranks)):
                assert torch.equal(share, order.indices(step, rank, ranks))
            ledger.commit(ranks, range(ranks))


@given(
    steps=st.integers(1, 12), batch=st.integers(5, 40), ranks=st.integers(1, 5), seed=st.integers(0, 9),
    rest=st.integers(0, 4),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_a_cursor_reads_the_same_order_in_the_same_shares(
    steps: int, batch: int, ranks: int, seed: int, rest: int
) -> None:
    """Where batches divide the samples all three agree on every row; a rest that makes no batch the cursor leaves."""
    samples = steps * batch + rest
    cursors = [Cursor(samples, batch=batch, seed=seed, world=_World(rank, ranks)) for rank in range(ranks)]
    for epoch in range(2):
        order = EpochOrder(samples, batch, seed, epoch)
        read = []
        for step in range(steps):
            shares = [next(cursor) for cursor in cursors]
            read += shares
            if not rest:
                assert all(torch.equal(share, order.indices(step, rank, ranks)) for rank, share in enumerate(shares))
        assert torch.equal(torch.cat(read), permutation(samples, seed, epoch)[: steps * batch])


def test_a_ledger_goes_back_to_the_common_division_in_the_next_epoch() -> None:
    ledger = SampleLedger(10, 3, 1)
    ledger.commit(2, [0])  # the second worker is dropped
    while ledger.epoch == 0:
        ledger.commit(1, [0])
    order = EpochOrder(10, 3, 1, 1)
    for step in range(order.steps):
        assert torch.equal(ledger.shares(1)[0], order.indices(step))
        ledger.commit(1, [0])
