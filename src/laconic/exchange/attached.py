"""Which exchange belongs to which model or optimiser, for `explain` and whoever else looks for it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from laconic.errors import BadInput
from laconic.exchange.state import CompressionState

if TYPE_CHECKING:
    from laconic.exchange.fsdp import ShardedCompression

    AnyState = CompressionState | ShardedCompression

_attached: weakref.WeakKeyDictionary[Any, AnyState] = weakref.WeakKeyDictionary()


def attach(subject: object, state: AnyState) -> None:
    """Let `state_of(subject)` find this state."""
    _attached[subject] = state


def is_attached(subject: object) -> bool:
    """Whether this model or optimiser has a state."""
    return subject in _attached


def state_of(subject: object) -> AnyState:
    """The state that `compress` or `distribute` gave this model or optimiser."""
    if subject not in _attached:
        raise BadInput(f"{type(subject).__name__} has no compressed exchange: call compress or distribute first")
    return _attached[subject]
