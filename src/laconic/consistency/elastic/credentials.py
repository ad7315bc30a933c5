"""The keys of a worker: the job's shared key, or its own if the job has a list of admitted members.

Callers: `line.py` as a worker joins, and `laconic join` before it starts a script.
"""

from __future__ import annotations

from laconic.consistency.elastic.meeting import Meeting
from laconic.consistency.elastic.places.base import split_address
from laconic.errors import NotAuthorised
from laconic.transports.member_keys import MEMBER_KEY_VARIABLE, MemberSecret, public_key, read_member_key
from laconic.transports.zeromq_keys import is_loopback, read_key


def own_credentials(meeting: Meeting, worker: int = 0) -> MemberSecret | None:
    """This worker's own key, if the job has a list of who may come; else None.

    Args:
        worker: its number; 0 if it has none yet.

    Raises:
        BadInput: LACONIC_MEMBER_KEY names no file of a member's key.
        NotAuthorised: it has no key of its own, or one that is not on the list.
    """
    meeting.read_list()
    own, listed = read_member_key(), meeting.admitted()
    if own is None and listed is None:
        return None
    if own is None:
        text = f"set {MEMBER_KEY_VARIABLE} to a file of `laconic key new`, and have its public half admitted"
        text = f"the job in {meeting.where} has a list of its members' keys: {text}; {_cure(meeting, 'PUBLIC_KEY')}"
        raise NotAuthorised(text, rank=worker)
    public = public_key(own)
    if listed is None or public not in listed:
        what = "is not on the job's list, or no more" if listed is not None else "is on no list: the job has none"
        whose = f"worker {worker}" if worker else "this worker"
        text = f"the key {public} of {whose} {what}; check the job's name, {meeting.where}; {_cure(meeting, public)}"
        raise NotAuthorised(text, rank=worker)
    return MemberSecret(own, meeting.admits)


def shared_key(meeting: Meeting, own: MemberSecret | None, host: str) -> bytes | None:
    """The job's key for a worker that listens at `host`: a given one, else the meeting place's where it is needed."""
    return read_key() if own or is_loopback(host) else read_key() or meeting.key()


def _cure(meeting: Meeting, public: str) -> str:
    if not meeting.where.startswith("tcp://"):
        return f"`laconic key admit {meeting.where} {public}` admits it"
    job = split_address(meeting.where, meeting.where)[1]
    command = f"on the machine of `laconic meet`, `laconic key admit FOLDER/{job} {public}` admits it"
    return f"{command}; FOLDER is the one that its --folder names"
