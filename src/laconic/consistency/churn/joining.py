"""How a worker comes into a group: it founds one, or asks the coordinator of the newest view until a view holds it.

Caller: `group.py`.
"""

from __future__ import annotations

import time

from laconic.consistency.churn.line import Line
from laconic.consistency.churn.meeting import View
from laconic.errors import BadInput, PeerLost

LOOK_S = 0.08  # how often the meeting folder is looked into while nobody answers
ASK_AGAIN_S = 1.0  # a coordinator may have changed its mind about us, or its role, without a new view


class Finished(Exception):
    """The training was over before this worker came."""


class Fenced(Exception):
    """The others have gone on without this worker: it is out, and may come back as a newcomer."""


def found(line: Line, job: str) -> View | None:
    """The first view, with this worker alone, if nobody has made one yet."""
    alone = View(1, ((line.id, line.address),), job, time.time())
    return alone if line.meeting.newest() is None and line.meeting.publish(alone) else None


def join(line: Line, job: str, patience_s: float) -> View:
    """Wait until a view holds this worker; returns that view.

    Args:
        job: what this worker would train.
        patience_s: how long nobody may be reachable.

    Raises:
        BadInput: the group trains something else.
        Finished: it has nothing more to train.
        PeerLost: nobody can be reached.
    """
    asked, asked_at, quiet_since = 0, 0.0, time.monotonic()
    while True:
        newest = line.meeting.newest()
        assert newest is not None
        if newest.job != job:
            raise BadInput(f"the job in {line.meeting.folder} trains {newest.job}; this worker has {job}")
        if line.id in newest.ids:
            return newest
        if newest.number != asked:
            quiet_since = time.monotonic()
        if newest.number != asked or time.monotonic() - asked_at > ASK_AGAIN_S:
            asked, asked_at = newest.number, time.monotonic()
            line.ask(newest)
        view = line.invitation(LOOK_S)
        if view is not None:
            return view
        if line.meeting.finished:
            raise Finished
        if line.has_reached(newest.coordinator):
            quiet_since = time.monotonic()  # it lives, and answers between two steps
        if time.monotonic() - quiet_since > patience_s:
            where = f"[worker {line.id}] nobody of view {newest.number} in {line.meeting.folder} can be reached"
            cure = "if all are gone, so is the model: begin in another folder"
            raise PeerLost(f"{where} within {patience_s:g} s; {cure}", rank=line.id, peer=newest.coordinator)
