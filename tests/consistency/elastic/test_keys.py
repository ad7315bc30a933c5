"""Members with keys of their own, and the job's list of who may come."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

import pytest

import laconic
from laconic.cli import main
from laconic.consistency.elastic import credentials, line
from laconic.consistency.elastic.meeting import Meeting
from laconic.errors import BadInput, NotAuthorised, StorageError
from laconic.transports.member_keys import MEMBER_KEY_VARIABLE, new_member_key, public_key, read_member_key
from tests.consistency.elastic.places import Served
from tests.consistency.elastic.trainers import Trainer, assert_alike, until

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = laconic.Samples(256, 32, 60)


class Keys:
    """A key for each worker of this process, in the order in which they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.secrets = [new_member_key() for _ in range(count)]
        self.public = [public_key(secret) for secret in self.secrets]
        self._of: dict[threading.Thread, bytes] = {}
        monkeypatch.setattr(credentials, "read_member_key", lambda: self._of[threading.current_thread()])
        start = Trainer.start

        def started(trainer: Trainer) -> None:
            self._of[trainer] = self.secrets[len(self._of)]
            start(trainer)

        monkeypatch.setattr(Trainer, "start", started)


@pytest.mark.parametrize("revoked", [0, 2], ids=["coordinator", "member"])
def test_a_revoked_member_is_out_with_the_next_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, revoked: int
) -> None:
    caplog.set_level(logging.INFO, "laconic.consistency")
    keys, meeting = Keys(monkeypatch, 3), Meeting(tmp_path)
    for public in keys.public:
        meeting.change_list(public, "somebody")
    workers = []
    for place in range(3):
        workers.append(Trainer(tmp_path, workers=3, data=LONG))
        until(lambda place=place: len(getattr(Meeting(tmp_path).newest(), "ids", ())) > place)  # type: ignore[misc]
    until(lambda: workers[1].calls > 10 or workers[1].error)
    meeting.change_list(keys.public[revoked], None)
    gone = workers.pop(revoked)
    for worker in workers:
        worker.ended()
    gone.join(60)
    assert isinstance(gone.error, NotAuthorised)
    assert "is not on the job's list" in str(gone.error)
    assert_alike(workers)
    assert [event["what"] for event in meeting.events()].count("lost: its key was revoked") == 1
    assert f": worker {revoked + 1} lost: its key was revoked" in caplog.text, "the log says why the view changed"


def test_who_is_not_on_the_list_cannot_come_and_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meeting, own = Meeting(tmp_path), tmp_path / "own.key"
    own.write_bytes(new_member_key())
    os.chmod(own, 0o600)
    monkeypatch.setenv(MEMBER_KEY_VARIABLE, str(own))
    with pytest.raises(NotAuthorised, match=r"is on no list: the job has none; check the job's name, "):
        line.Line(meeting, 1, 5.0)
    other = Meeting(tmp_path)
    other.change_list(public_key(new_member_key()), "another")
    admitted_by = re.escape(f"`laconic key admit {tmp_path} {public_key(own.read_bytes())}` admits it")
    with pytest.raises(NotAuthorised, match=f"is not on the job's list, or no more; .*{admitted_by}"):
        line.Line(other, 1, 5.0)
    (tmp_path / "train.py").write_text("")
    join = ["join", str(tmp_path), str(tmp_path / "train.py")]
    with pytest.raises(SystemExit) as ended:
        main(join)
    assert ended.value.code == 2, "systemd does not try again"
    assert f"{public_key(own.read_bytes())} of this worker is not on the job's list" in capsys.readouterr().err
    monkeypatch.setenv(MEMBER_KEY_VARIABLE, "missing.key")
    with pytest.raises(SystemExit) as ended:
        main(join)
    assert ended.value.code == 2
    assert "the key file missing.key cannot be read" in capsys.readouterr().err
    monkeypatch.delenv(MEMBER_KEY_VARIABLE)
    with pytest.raises(NotAuthorised, match=f"has a list of its members' keys: set {MEMBER_KEY_VARIABLE}"):
        line.Line(other, 1, 5.0)


def test_nobody_changes_the_list_over_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Served(tmp_path)
    try:
        far = Meeting(place.where("sum"))
        assert far.admitted() is None
        with pytest.raises(StorageError, match="admitted and revoked on the machine where `laconic meet` runs"):
            far.change_list(public_key(new_member_key()), "me")
        near = Meeting(tmp_path / "sum")
        near.change_list(mine := public_key(new_member_key()), "me")
        far.read_list()
        assert far.admits(mine)
        monkeypatch.setenv(MEMBER_KEY_VARIABLE, str(tmp_path / "own.key"))
        (tmp_path / "own.key").write_bytes(secret := new_member_key())
        os.chmod(tmp_path / "own.key", 0o600)
        cure = f"on the machine of `laconic meet`, `laconic key admit FOLDER/sum {public_key(secret)}` admits it"
        with pytest.raises(NotAuthorised, match=cure):
            line.Line(far, 1, 5.0)
        far.close()
    finally:
        place.stop()


def test_keys_are_made_shown_admitted_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["key", *words])
        assert ended.value.code == 0, capsys.readouterr()
        return capsys.readouterr().out

    file, job = str(tmp_path / "a.key"), str(tmp_path / "job")
    made, public = run("new", file).split()[-1], run("show", file).strip()
    assert made == public
    assert os.stat(file).st_mode & 0o777 == 0o600
    run("admit", job, public, "ann")
    assert Meeting(job).admits(public)
    assert run("list", job) == f"{public} ann\n"
    run("revoke", job, public)
    assert not Meeting(job).admits(public)
    assert Meeting(job).admitted() == frozenset(), "a list without anybody admits nobody"


@pytest.mark.parametrize(
    ("words", "text"),
    [(("new",), "see `laconic key --help`"), (("admit", "job", "short"), "is no public key"),
     (("revoke", "job", "0" * 64), "is not on the list"), (("show", "missing"), "cannot be read"),
     (("admit", "missing/sum", "0" * 64), "there is no folder missing; name the folder of `laconic meet` and the job"),
     (("list", "missing"), "there is no folder missing"), (("list", "."), "has no list: whoever has the shared key"),
     (("show", "job.key"), "holds the key that all members share, which has no public half")],
    ids=str,
)  # fmt: skip
def test_a_wrong_word_is_one_sentence(
    words: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["key", "job.key"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["key", *words])
    assert ended.value.code == 2
    assert not (tmp_path / "missing").exists()
    assert text in (said := capsys.readouterr().err)
    assert said.count("\n") == 1


def test_a_file_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("not a key, though long enough")
    os.chmod(tmp_path / "x", 0o600)
    with pytest.raises(BadInput, match="holds no member's key; make one with `laconic key new FILE`"):
        read_member_key(tmp_path / "x")
