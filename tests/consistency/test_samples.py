"""The sample ledger: every sample of an epoch once, through any churn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.consistency.churn.deadline import Deadline
from laconic.consistency.churn.samples import SampleLedger
from laconic.errors import BadInput

# What a block meets: how many workers there are, which of them are dropped, whether it is lost, and how many steps.
BLOCK = st.tuples(st.integers(1, 7), st.sets(st.integers(0, 6)), st.booleans(), st.integers(1, 4))


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    seed=st.integers(0, 5),
    churn=st.lists(BLOCK, min_size=1, max_size=30),
)
@settings(max_examples=150)
def test_every_sample_of_an_epoch_is_used_once(
    samples: int, batch: int, seed: int, churn: list[tuple[int, set[int], bool, int]]
) -> None:
    ledger = SampleLedger(samples, batch, seed)
    used: list[int] = []
    step = 0
    while ledger.epoch < 2:
        parts, dropped, lost, steps = churn[step % len(churn)] if step < 200 else (1, set(), False, 1)
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


def test_the_deadline_is_learned() -> None:
    deadline = Deadline(5.0, floor_s=0.1, factor=3.0, quantile=0.9, kept=100, enough=10)
    for _ in range(9):
        deadline.observe(1.0)
    assert deadline.seconds == 5.0, "too few steps to say"
    deadline.observe(1.0)
    assert deadline.seconds == 3.0
    for _ in range(200):
        deadline.observe(0.001)
    assert deadline.seconds == 0.1, "never below the floor"
    for _ in range(15):
        deadline.observe(2.0)
    assert deadline.seconds == 6.0, "past the quantile it follows the slow steps"
    with pytest.raises(BadInput):
        Deadline(0.0)
