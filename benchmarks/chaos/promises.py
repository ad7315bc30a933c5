"""What a job promises under a fault: what its door and mode declare, and what its engine adds to that.

Callers: the faults, which hand it to the judge; the judge knows no modes. A mode says whose loss it outlives and
whether its training can be repeated to the bit (`Mode.outlives`, `Mode.repeatable`); docs/reference/faults.md has
the same in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.scenario import Scenario
from laconic.consistency import build

LEAST = 3  # ranks, of which one is lost and two are left
GO_ON, END, EITHER, RAISE = "go on", "end", "either", "raise"


@dataclass(frozen=True)
class Promise:
    """How ranks end.

    Attributes:
        others: of the ranks that nothing was done to: go on (finish with one model), end (each raises a typed error),
            or either of them, all alike.
        victim: the same of the rank that something was done to, or raise: with the very error of its user's code.
        names: every error names one of these ranks; None where it need not.
        launcher_ends: the launcher may end the others without a word.
        digests: by rank, what all who finish end with, as in the run without a fault; None where that may differ.
        foreign: errors of torch's own exchanges are as good as ours, and name nobody.
        alike: all who finish have the same weights.
        finite: and no NaN or infinity in them.
    """

    others: str = GO_ON
    victim: str = GO_ON
    names: frozenset[int] | None = None
    launcher_ends: bool = False
    digests: Mapping[int, int | None] | None = None
    alike: bool = True
    finite: bool = True
    foreign: bool = False


def of_loss(scenario: Scenario, victims: Collection[int], victim: str = EITHER) -> Promise:
    """When ranks are lost for good, or for longer than the time-out.

    While ranks still meet, there may be nothing yet that could go on. Whether one that is lost in `finish` or `close`
    had done its part already is a matter of chance; so is what is left after two of four are.
    """
    door, engine, phase = DOORS[scenario.door], scenario.engine, scenario.phase
    alike, foreign = door.alike(scenario.case), door.foreign(scenario.case)
    if scenario.door == "elastic":
        return Promise(EITHER if phase == "start" else GO_ON, victim)
    goes_on = all(door.outlives(scenario.case, each, scenario.ranks) for each in victims)
    some = any(door.outlives(scenario.case, each, scenario.ranks) for each in victims)
    if some and (engine == "threads" or len(victims) > 1):
        # threads have no store through which the others could agree that it is gone
        return Promise(EITHER, victim, alike=alike)
    if goes_on and engine == "mpi":  # neither is there here: whoever ends first is lost to the next
        return Promise(EITHER, victim, launcher_ends=True)
    if phase == "start":
        return Promise(EITHER if goes_on else END, victim, None, engine == "mpi", alike=alike, foreign=foreign)
    ending = phase in ("finish", "close")
    others = EITHER if ending else GO_ON if goes_on else END
    silent = engine == "threads" and scenario.fault == "stop"  # a thread has no heartbeat that could be missed
    names = None if goes_on or ending or foreign or silent else frozenset(victims)
    return Promise(others, victim, names, engine == "mpi", alike=alike, foreign=foreign)


def of_pause(scenario: Scenario, digests: Mapping[int, int | None], *, resumed: bool = False) -> Promise:
    """When a rank is held up for much less than the time-out, or nothing of the job itself is touched.

    Args:
        resumed: the job has gone on from a checkpoint.
    """
    door = DOORS[scenario.door]
    repeats = door.resumes(scenario.case, scenario.codec) if resumed else door.repeatable(scenario.case)
    same = digests if repeats else None
    return Promise(GO_ON, GO_ON, digests=same, alike=door.alike(scenario.case))


def in_words(spec: str) -> str:
    """The row of a mode in docs/reference/faults.md.

    >>> in_words("sync")
    '| `sync` | each of the others raises | the same bits |'
    """
    mode = build(spec)
    fatal = [rank for rank in range(LEAST) if not mode.outlives(rank, LEAST)]
    if not fatal:
        lost = "the others go on"
    elif len(fatal) == LEAST:
        lost = "each of the others raises"
    else:
        last = {0: "rank 0", LEAST - 1: "the last rank"}
        lost = f"the others go on; without {' or '.join(last.get(each, str(each)) for each in fatal)}, each raises"
    return f"| `{spec}` | {lost} | {'the same bits' if mode.repeatable else 'other bits'} |"
