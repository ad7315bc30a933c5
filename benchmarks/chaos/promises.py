"""What a job promises under a fault: what its mode declares, and what its engine adds to that.

Callers: the faults, which hand it to the judge; the judge knows no modes. A mode says whose loss it outlives and
whether its training can be repeated to the bit (`Mode.outlives`, `Mode.repeatable`); docs/faults.md has the same in
words.
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.consistency import build

LEAST = 3  # ranks, of which one is lost and two are left
GO_ON, END, EITHER = "go on", "end", "either"


@dataclass(frozen=True)
class Promise:
    """How ranks end.

    Attributes:
        others: of the ranks that nothing was done to: go on (finish with one model), end (each raises a typed error),
            or either of them, all alike.
        victim: the same of the rank that something was done to; None where nothing is left of it.
        names: the rank that every error names.
        launcher_ends: the launcher may end the others without a word.
        digest: the weights of all who finish, as in the run without a fault; None where they may differ from it.
    """

    others: str = GO_ON
    victim: str | None = GO_ON
    names: int | None = None
    launcher_ends: bool = False
    digest: int | None = None


def of_loss(mode: str, engine: str, victim: int, ranks: int, moment: str) -> Promise:
    """When a rank is lost for good, or for longer than the time-out.

    While ranks still meet (`moment` is start), there may be nothing yet that could go on. Whether one that is lost in
    `finish` had done its part already is a matter of chance.
    """
    if engine == "elastic":
        return Promise(EITHER if moment == "start" else GO_ON, EITHER)
    goes_on = build(mode).outlives(victim, ranks)
    if goes_on and engine == "threads":
        return Promise(EITHER, EITHER)  # there is no store through which the others could agree that it is gone
    if goes_on and engine == "mpi":  # neither is there here: whoever ends first is lost to the next
        return Promise(EITHER, EITHER, launcher_ends=True)
    if moment == "start":
        return Promise(EITHER if goes_on else END, EITHER, launcher_ends=engine == "mpi")
    others = GO_ON if goes_on else EITHER if moment == "finish" else END
    return Promise(others, EITHER, names=None if goes_on else victim, launcher_ends=engine == "mpi")


def of_pause(mode: str, engine: str, digest: int | None) -> Promise:
    """When a rank is held up for much less than the time-out, or nothing of the job itself is touched."""
    same = digest if engine != "elastic" and build(mode).repeatable else None
    return Promise(GO_ON, GO_ON, digest=same)


def in_words(spec: str) -> str:
    """The row of a mode in docs/faults.md.

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
