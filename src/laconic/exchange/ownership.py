"""Mark whose state is whose: a rank's residuals are its own, and must be restored to it.

Callers: every job's `state_dict` and `load_state_dict`. A saved state records its rank, the world size and the number
of its tensors. So loading detects a checkpoint that kept one rank's state for all, or dropped tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.storage.form import check_like
from laconic.storage.tree import map_tensors
from laconic.transports.world import World

OWNER = "owner"
_ADVICE = "save laconic.SharedState(job) in checkpoints that ranks share"


def owned(state: dict[str, Any], rank: int, world_size: int, *, whole: bool = True) -> dict[str, Any]:
    """Add the owner to a state and, if it is whole, the number of its tensors."""
    tensors = {"tensors": _tensors(state)} if whole else {}
    return {**state, OWNER: {"rank": rank, "world_size": world_size, **tensors}}


def check_owner(state: Mapping[str, Any], world: World) -> None:
    """Refuse a state of another rank or world size; one without tensors is the same on all ranks, and may be loaded.

    Raises:
        BadInput: it is another rank's, has no owner, or lacks tensors.
    """
    if not isinstance(state, Mapping):
        raise BadInput(f"this is no job's state: a job's state_dict() is a mapping, got {type(state).__name__}")
    if OWNER not in state:
        found = ", ".join(map(str, state)) or "nothing"
        raise BadInput(f"this is no job's state: it does not say whose it is, and has {found}")
    owner, here = state[OWNER], f"[rank {world.rank}/{world.world_size}]"
    check_like(owner, {"rank": 0, "world_size": 0}, "the note whose the state is")
    count = _tensors(dict(state))
    if (saved := owner.get("tensors", count)) != count:
        text = f"of {saved} tensors that were saved {count} have come back"
        raise BadInput(f"{here} the state is not whole: {text}; {_ADVICE}")
    if count and (owner["rank"], owner["world_size"]) != (world.rank, world.world_size):
        text = f"the state is that of rank {owner['rank']} of {owner['world_size']}, whose residuals are its own"
        raise BadInput(f"{here} {text}; {_ADVICE}, or each rank's own, or use laconic.exchange.merge_state_dicts")


def check_scale(state: Mapping[str, Any], *, scaled: bool) -> None:
    """Refuse a state whose residuals are in units of a loss scale, if the job is not `scaled`."""
    check_like({"scale": state.get("scale", 1.0)}, {"scale": 1.0}, "the state of the exchange")
    if not scaled and state.get("scale", 1.0) != 1.0:
        raise BadInput("the residuals of this state are in units of a GradScaler's scale: give compress scaler=…, too")


def _tensors(state: dict[str, Any]) -> int:
    count = 0

    def tally(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor

    map_tensors(state, tally)
    return count


def mean_by_name(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each name's vectors, zeros standing for those that are not there."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: functools.reduce(torch.add, [p[name] for p in parts if name in p]) / len(parts) for name in names}


def merge_state_dicts(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Convert the state dicts of all old ranks to those of `world_size` new ranks; no residual is dropped.

    A mean over P ranks weighs each rank's residual with 1/P, so every new rank gets the mean of the old residuals, and
    of the old velocities where there is momentum.

    >>> from laconic.exchange.state import CompressionState
    >>> state = CompressionState("topk(0.01)", torch.nn.Linear(64, 64).named_parameters()).state_dict()
    >>> len(merge_state_dicts([state], 3))
    3
    """
    ranks = sorted(state.get(OWNER, {}).get("rank", -1) for state in states)
    if not states or world_size < 1 or ranks != list(range(len(states))):
        raise BadInput("merge_state_dicts needs the state of every old rank and a new world size of at least 1")
    kinds = [kind for kind in ("residuals", "velocity") if any(kind in state for state in states)]
    shares = {kind: mean_by_name([state.get(kind, {}) for state in states]) for kind in kinds}
    alike = {key: states[0][key] for key in ("step", "steps", "warm", "scale") if key in states[0]}
    return [owned(map_tensors({**alike, **shares}, torch.clone), rank, world_size) for rank in range(world_size)]
