"""Recurrent layers equal torch's and the equations, with the same gradients to the bit however little is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from laconic.errors import BadInput
from laconic.operators import GRU, LSTM
from laconic.operators.bptt import Budget, Walk, costs, first_cuts
from laconic.operators.cells import CELLS, _tanh
from laconic.operators.recurrent import BLOCK, _Run, budget_for
from reference import recurrent as reference

KINDS = {"LSTM": (LSTM, nn.LSTM), "GRU": (GRU, nn.GRU)}
every_kind = pytest.mark.parametrize("kind", KINDS)


def pair(kind, memory, layers=1, **options):
    """Ours and torch's, with the same weights, in float64."""
    torch.manual_seed(0)
    ours = KINDS[kind][0](3, 5, layers, memory=memory, **options).double()
    theirs = KINDS[kind][1](3, 5, layers, **options).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def flat(state):
    return list(state) if isinstance(state, tuple) else [state]


@every_kind
def test_one_sequence_equals_the_equations(kind):
    layer, _ = pair(kind, 1.0)
    x = torch.randn(11, 3, dtype=torch.float64)
    outputs, state = layer(x)
    weights = [p.detach().numpy() for p in layer.parameters()]
    zero = [np.zeros(5)] * len(flat(state))
    wanted, last = getattr(reference, kind.lower())(x.numpy(), *zero, *weights)
    np.testing.assert_allclose(outputs.detach(), wanted, atol=1e-12)
    for a, b in zip(flat(state), last, strict=True):
        np.testing.assert_allclose(a.detach()[0], b, atol=1e-12)


@every_kind
@pytest.mark.parametrize("memory", [1.0, 0.5, 0.25])
@settings(max_examples=8)
@given(steps=st.integers(1, 70), batch=st.integers(1, 3), layers=st.integers(1, 2), first=st.booleans())
def test_outputs_and_gradients_equal_torchs(kind, memory, steps, batch, layers, first):
    ours, theirs = pair(kind, memory, layers, batch_first=first)
    blocks = -(-steps // BLOCK)
    if memory < 1 and 1 < blocks < 6:
        memory = ours.memory = 0.75  # short sequences have no such little memory
    x = torch.randn((batch, steps, 3) if first else (steps, batch, 3), dtype=torch.float64, requires_grad=True)
    found, wanted = ours(x), theirs(x)
    for a, b in zip([found[0], *flat(found[1])], [wanted[0], *flat(wanted[1])], strict=True):
        torch.testing.assert_close(a, b)
    losses = [(y[0].square().sum() + sum(s.sin().sum() for s in flat(y[1]))) for y in (found, wanted)]
    of_ours = torch.autograd.grad(losses[0], [x, *ours.parameters()])
    of_theirs = torch.autograd.grad(losses[1], [x, *theirs.parameters()])
    for a, b in zip(of_ours, of_theirs, strict=True):
        torch.testing.assert_close(a, b)


@every_kind
def test_gradients_of_the_first_state(kind):
    ours, theirs = pair(kind, 0.5, 2)
    x = torch.randn(60, 3, 3, dtype=torch.float64)
    first = tuple(torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(CELLS[kind].states))
    state = first if kind == "LSTM" else first[0]
    found, wanted = (torch.autograd.grad(layer(x, state)[0].square().sum(), first) for layer in (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@every_kind
def test_packed_sequences(kind):
    ours, theirs = pair(kind, 0.5, 2)
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 60, 33, 33, 1)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    found, wanted = ours(packed), theirs(packed)
    torch.testing.assert_close(found[0].data, wanted[0].data)
    for a, b in zip(flat(found[1]), flat(wanted[1]), strict=True):
        torch.testing.assert_close(a, b)
    of_ours = torch.autograd.grad(found[0].data.square().sum(), list(ours.parameters()))
    of_theirs = torch.autograd.grad(wanted[0].data.square().sum(), list(theirs.parameters()))
    for a, b in zip(of_ours, of_theirs, strict=True):
        torch.testing.assert_close(a, b)


@every_kind
def test_gradients_have_the_same_bits_however_little_is_kept(kind):
    layer = KINDS[kind][0](7, 16)
    x = torch.randn(200, 4, 7)
    grads = []
    for memory in (1.0, 0.5, 0.1, 0.06):
        layer.memory = memory
        grads.append(torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters())))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


@every_kind
def test_a_second_way_back_is_refused_where_little_is_kept(kind):
    layer, x = KINDS[kind][0](2, 3, memory=0.5), torch.randn(100, 1, 2)
    loss = layer(x)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(BadInput, match="gone back through once"):
        loss.backward()


def test_the_fraction_for_tanh():
    tanh = _tanh("float32")
    x = np.concatenate([np.linspace(-12, 12, 9999), [0.0, 1e-30, -1e-6, 1e30]]).astype(np.float32)
    found, exact = np.array([tanh(v) for v in x]), np.tanh(x.astype(np.float64))
    assert np.abs(found - exact).max() < 4e-7
    assert np.all(np.abs(found) <= 1)
    assert np.all(np.abs(found - exact) <= 4e-7 * np.abs(exact))


@every_kind
def test_float32_is_near_torchs(kind):
    torch.manual_seed(0)
    ours, theirs = KINDS[kind][0](7, 20), KINDS[kind][1](7, 20)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(40, 3, 7)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-5, atol=1e-6)


@every_kind
def test_gradcheck(kind):
    layer = KINDS[kind][0](2, 3).double()
    x = torch.randn(2 * BLOCK, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@every_kind
def test_a_thousand_steps_in_a_twentieth_of_the_memory_for_a_third_more_time(kind):
    """Forward, once more forward, and back, which costs two forwards: 4/3 of the time."""
    budget = budget_for(CELLS[kind], 1000 // BLOCK, 0.05)
    assert costs(budget)[0][budget.blocks, 0] <= 2 * budget.blocks  # at most one more forward pass
    assert budget.total <= 0.05 * budget.inside * budget.blocks


@given(blocks=st.integers(1, 9), memory=st.integers(1, 30), inside=st.integers(1, 6), state=st.integers(1, 3))
def test_the_plan_is_the_cheapest_and_never_exceeds_its_memory(blocks, memory, inside, state):
    budget = Budget(blocks, memory, inside, state)
    wanted = reference.least_computations(blocks, memory, inside, state)
    assert costs(budget)[0][blocks, 0] == wanted
    if wanted == float("inf"):
        return
    cuts = [0, *first_cuts(budget)]
    kept, peak, counted = {cut: cut for cut in cuts[:-1]}, 0, 0
    done = list(reversed(range(cuts[-1], blocks)))

    def advance(block, state_before):
        nonlocal counted
        assert state_before == block
        counted += 1
        return block + 1

    def back(first, last, state_before):
        nonlocal counted, peak
        assert state_before == first
        counted += last - first
        peak = max(peak, inside * (last - first) + state * (len(kept)))
        done.extend(reversed(range(first, last)))

    Walk(budget, advance, back).go(kept, cuts[-1])
    assert done == list(reversed(range(blocks)))
    assert peak <= memory + state  # the first state is the caller's
    assert blocks + counted == wanted


def test_bad_input_is_one_sentence():
    with pytest.raises(BadInput, match="above 0 and at most 1"):
        LSTM(3, 5, memory=0)(torch.zeros(20, 1, 3))
    with pytest.raises(BadInput, match="below the least for 40 steps"):
        LSTM(3, 5, memory=0.01)(torch.zeros(40, 1, 3))
    with pytest.raises(BadInput, match="float32 or float64 on the CPU, not torch"):
        LSTM(3, 5).half()(torch.zeros(40, 1, 3).half())
    with pytest.raises(BadInput, match="both directions"):
        GRU(3, 5, bidirectional=True)(torch.zeros(40, 1, 3))
    for shape in ((4, 2, 1, 3), (4, 2, 5), (3,)):
        with pytest.raises(BadInput, match="takes sequences of shape"):
            LSTM(3, 5)(torch.zeros(shape))
    x, fitting = torch.zeros(4, 2, 3), torch.zeros(1, 2, 5)
    for odd in (*map(torch.zeros, ((1, 1, 5), (1, 3, 5), (2, 2, 5), (1, 2, 4))), fitting.double()):
        with pytest.raises(BadInput, match=r"the first state of this layer is \(1, 2, 5\) of torch.float32 here, not"):
            LSTM(3, 5)(x, (fitting, odd))
        with pytest.raises(BadInput, match="the first state"):
            GRU(3, 5)(x, odd)


@every_kind
def test_a_batch_of_nothing_gives_nothing(kind):
    ours, theirs = pair(kind, 1.0)
    x = torch.zeros(4, 0, 3, dtype=torch.float64)
    assert ours(x)[0].shape == theirs(x)[0].shape == (4, 0, 5)


@every_kind
def test_nothing_is_kept_where_no_gradient_is_asked_for(kind, monkeypatch):
    ours, _ = pair(kind, 1.0)
    kept, room = [], _Run.room
    monkeypatch.setattr(_Run, "room", lambda run, first, last: kept.append(last - first) or room(run, first, last))
    with torch.no_grad():
        ours(torch.zeros(10 * BLOCK, 1, 3, dtype=torch.float64))
    assert kept == [1]  # the one block that is worked in
