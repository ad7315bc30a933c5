"""What to call the end of a job: survived, hung, lost or wrong.

Caller: the faults. The judge knows what was promised and how each rank ended, and nothing else.

- hung: a rank still waits after its time-out and a grace.
- wrong: ranks end with success but different weights, or with others than promised, or NaN; or where an error was
  promised, since somebody's work is missing; or damaged content was accepted.
- lost: an error that is not Laconic's, or one where the job was to go on, or without the peer's name, or in place of
  the one that a user's own code raised; a process that ended without a word; a checkpoint that should be there and is
  not.
- survived: the job ended as promised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.chaos.launch import Ending
from benchmarks.chaos.promises import END, GO_ON, RAISE, Promise
from benchmarks.chaos.task import UserError

SURVIVED, HUNG, LOST, WRONG, SKIPPED = "survived", "hung", "lost", "wrong", "skipped"
TORCHS = ("RuntimeError", "DistBackendError", "DistNetworkError")  # of its own exchanges
FAILURES = (HUNG, LOST, WRONG)


@dataclass(frozen=True)
class Verdict:
    """One of the columns, and why."""

    column: str
    why: str = ""


def judge(promise: Promise, endings: Sequence[Ending], *victims: int) -> Verdict:
    """What became of a job whose ranks ended like this; a victim that is gone has no ending here."""
    if waiting := [each for each in endings if each.what == "waits"]:
        return Verdict(HUNG, "; ".join(f"rank {each.rank} still waits, {each.text}" for each in waiting))
    finished = [each for each in endings if each.what == "finished"]
    if why := _wrong(promise, finished, victims):
        return Verdict(WRONG, why)
    for each in endings:
        expected = promise.victim if each.rank in victims else promise.others
        if why := _lost(promise, expected, each, victims):
            return Verdict(LOST, f"rank {each.rank} {why}")
    return Verdict(SURVIVED)


def _wrong(promise: Promise, finished: Sequence[Ending], victims: Collection[int]) -> str:
    if promise.alike and len({each.digest for each in finished}) > 1:
        return f"ranks finished with different weights: { {each.rank: each.digest for each in finished} }"
    for each in finished:
        if promise.finite and not each.finite:
            return f"rank {each.rank} finished with NaN or infinity"
        if promise.digests is not None and each.digest != promise.digests.get(each.rank):
            return f"rank {each.rank} finished with other weights than without the fault"
        if each.rank not in victims and promise.others == END:
            return f"rank {each.rank} finished as if no worker had been lost"
        if each.rank in victims and promise.victim == RAISE:
            return f"rank {each.rank} finished though its own code had raised"
    return ""


def _lost(promise: Promise, expected: str, ending: Ending, victims: Collection[int]) -> str:
    if ending.what == "died":
        return "" if promise.launcher_ends else f"died {ending.text}"
    if ending.what == "finished":
        return ""
    told = f"{ending.kind}: {ending.text}"
    if expected == RAISE:
        return "" if ending.kind == UserError.__name__ else f"has not the error of its own code but {told}"
    if not ending.typed and not (promise.foreign and ending.kind in TORCHS):
        return f"ended with an error that is not ours, {told}"
    if expected == GO_ON:
        return f"was to go on and ended with {told}"
    unnamed = promise.names is not None and not any(names(ending, rank) for rank in promise.names)
    return (
        f"names none of ranks {sorted(promise.names or ())}: {told}" if unnamed and ending.rank not in victims else ""
    )


def names(ending: Ending, rank: int) -> bool:
    """Whether an error names a rank, as its peer or in its sentence (after the bracket with the rank that reports).

    >>> names(Ending(0, "error", text="[rank 0/3] ring: peer 2 was lost", peer=None), 2)
    True
    """
    sentence = re.sub(r"\[rank \d+[^]]*\]", "", ending.text)
    return ending.peer == rank or re.search(rf"\b(rank|peer|worker|ranks|peers) {rank}\b", sentence) is not None
