"""The residuals of all ranks of an old world, divided among the ranks of a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from laconic.errors import BadInput


def merge_state_dicts(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """State dicts of all old ranks as those of `world_size` new ranks: nothing that is still to be sent is dropped.

    A mean over P ranks weighs each rank's residual with 1/P, so every new rank gets the mean of the old residuals, and
    of the old velocities where there is momentum.
    """
    if not states or world_size < 1:
        raise BadInput("merge_state_dicts needs the state of every old rank and a new world size of at least 1")
    kinds = [kind for kind in ("residuals", "velocity") if any(kind in state for state in states)]
    shares = {kind: _mean_by_name([state.get(kind, {}) for state in states]) for kind in kinds}
    return [
        {
            "step": states[0]["step"],
            "warm": {codec: _cloned(kept) for codec, kept in states[0].get("warm", {}).items()},
            **{kind: _cloned(share) for kind, share in shares.items()},
        }
        for _ in range(world_size)
    ]


def _cloned(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def _mean_by_name(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each name's vectors, zeros standing for those that are not there."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value.clone()
    return {name: value / len(parts) for name, value in total.items()}
