"""Interruptions of a run: entries in its record, and marks on the curves once it has been resumed.

Callers: `train` and `compare`. Invariant: each start that ended too early is recorded once, by the process that saw it
end or, if that was killed, by the next resumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from laconic import words
from laconic_lab.environment import run_environment
from laconic_lab.records.record import FILE, Event, Interruption, Record, TrialRecord

SAME = ("host", "cpu", "cores", "python", "torch", "laconic", "commit")  # or trials of two starts differ by it
CUT_OFF = "cut off: the command ended without a word"


def failure(error: Exception, reached: int, checkpoint: int) -> Interruption:
    """The entry for a worker's failure that ended the run after about `reached` steps; resume from `checkpoint`."""
    step = max(reached, checkpoint)
    peer = getattr(error, "peer", None)  # who was lost, where somebody else tells of it
    rank = peer if peer is not None else getattr(error, "rank", None)
    return Interruption(now(), step, rank, first_line(error), step - checkpoint)


def stopped(step: int, lost: int = 0) -> Interruption:
    """The entry for a stop on request."""
    return Interruption(now(), step, None, "stopped on request", lost)


def note_resumption(record: Record, folder: Path, checkpoint: int, reached: int) -> None:
    """Count a new start, and record how the last one ended, unless that is recorded already.

    Args:
        checkpoint: the step that is gone on from; more may be lost than was told, when the newest is broken.
        reached: the last step of the start before that is known of.
    """
    told = [each for each in record.interruptions if each.ended]
    if len(told) < record.starts:
        reached = max(reached, checkpoint)
        record.interruptions.append(Interruption(_last_sign(folder), reached, None, CUT_OFF, reached - checkpoint))
    elif told and told[-1].step is not None and told[-1].step - told[-1].lost > checkpoint:
        at = record.interruptions.index(told[-1])
        what = f"{told[-1].what}; the newest checkpoint was broken"
        record.interruptions[at] = replace(told[-1], what=what, lost=told[-1].step - checkpoint)
    record.starts += 1


def comparison_ended(record: Record, what: str, when: str | None = None) -> None:
    """Record that a comparison ended before its last trial, why and where."""
    done = f"{len(record.trials)} of {len(record.seeds) * len(record.configurations)} trials were done"
    record.interruptions.append(Interruption(when or now(), None, None, f"{what}; {done}"))


def note_resumed_comparison(record: Record, folder: Path) -> None:
    """Count a new start of a comparison, and record how the last one ended, unless that is recorded already."""
    if len(record.interruptions) < record.starts:
        comparison_ended(record, CUT_OFF, _last_sign(folder))
    here = run_environment()
    if others := [name for name in SAME if here[name] != record.environment.get(name)]:
        told = ", ".join(f"{name} {here[name]}" for name in others)
        last = record.interruptions[-1]
        record.interruptions[-1] = replace(last, what=f"{last.what}; gone on with by {told}")
    record.starts += 1


def marks(trial: TrialRecord, interruptions: Sequence[Interruption]) -> list[Event]:
    """The interruptions of a training that was resumed, as events on its clock, where it went on from."""
    steps = trial.step_seconds or []
    clock = list(accumulate(steps, initial=trial.seconds_total - sum(steps)))
    made = []
    for each in interruptions:
        from_step = min(max(0, (each.step or 0) - each.lost), len(steps))
        begun = f"resumed from the checkpoint at step {from_step}" if from_step else "begun again"
        lost = f", {words.count(each.lost, 'step')} done again" if each.lost else ""
        made.append(Event(clock[from_step], from_step, each.rank, f"{each.what}; {begun}{lost}"))
    return made


def first_line(error: Exception) -> str:
    """The error without its traceback."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _last_sign(folder: Path) -> str:
    """When an interrupted run last wrote a file, UTC."""
    written = [path.stat().st_mtime for path in (*folder.glob("*.jsonl"), *folder.glob(FILE))]
    return datetime.fromtimestamp(max(written), UTC).isoformat(timespec="seconds") if written else now()


def now() -> str:
    """The time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
