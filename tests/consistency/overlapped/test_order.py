"""The order of buckets: always a permutation, never worse than as made, and best where all can be tried."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.exchange.order import Timeline, best_order

_seconds = st.floats(0, 10, allow_nan=False)


@st.composite
def _timelines(draw: st.DrawFn) -> Timeline:
    count = draw(st.integers(1, 6))
    lists = [draw(st.lists(_seconds, min_size=count, max_size=count)) for _ in range(3)]
    return Timeline(*lists)


@given(_timelines())
@settings(max_examples=200)
def test_never_worse_than_as_made(timeline: Timeline) -> None:
    order = best_order([timeline])
    made = sorted(range(len(order)), key=lambda bucket: (timeline.ready[bucket], bucket))
    assert sorted(order) == sorted(made)
    assert timeline.waiting_s(order) <= timeline.waiting_s(made)


def test_a_chain_of_layers_is_sent_as_well_as_it_can_be() -> None:
    """Backward makes bucket 0 first, the next forward needs it last: as in every chain of layers."""
    for wire in (0.1, 1.0, 3.0):
        chain = Timeline(ready=[1.0, 2.0, 3.0, 4.0], wire=[wire] * 4, needed=[3.0, 2.0, 1.0, 0.0])
        best = min(chain.waiting_s(order) for order in permutations(range(4)))
        assert chain.waiting_s(best_order([chain])) <= best + 1e-9


def test_what_gets_through_during_backward_goes_as_it_is_made() -> None:
    quick = Timeline(ready=[1.0, 2.0, 3.0], wire=[0.5, 0.5, 0.5], needed=[2.0, 1.0, 0.0])
    assert best_order([quick]) == [0, 1, 2]
