"""`laconic meet`, `join` and `status`, as somebody types them on machines that share nothing but an address."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from laconic.cli import main
from laconic.cli.join import _is_local, _is_public
from laconic.cli.status import collect, exposition
from laconic.consistency.elastic.meeting import Meeting, View, event
from laconic.consistency.elastic.places.server import meeting_secret
from laconic.transports.relay import PORTS, RelayServer
from laconic.transports.zeromq_keys import is_private
from tests.consistency.elastic.places import answering, free_port
from tests.consistency.elastic.trainers import until

SCRIPT = """
import sys
import torch
import laconic

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
x = torch.randn(64, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with laconic.elastic(model, optimizer, laconic.Samples(64, 16, 8), codec="none", workers=2) as job:
    for batch in job.batches():
        model(x[batch]).square().mean().backward()
        job.step()
    print(sys.argv[1], job.steps, job.digest)
"""


def _laconic(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laconic", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.mark.processes
def test_two_workers_meet_train_and_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    place = f"tcp://127.0.0.1:{(port := free_port())}/sum"
    host = "lo" if sys.platform == "linux" else "127.0.0.1"
    words = ("--host", host, "--port", str(port), "--relay", str(free_port()), "--folder", str(tmp_path / "kept"))
    meeting = _laconic("meet", *words)
    try:
        until((tmp_path / "kept").exists)
        workers = [_laconic("join", place, str(tmp_path / "train.py"), name) for name in ("first", "second")]
        said = [worker.communicate(timeout=100) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
        (one, *rest), (other, *same) = (out.split() for out, _ in said)
        assert {one, other} == {"first", "second"}
        assert rest == same, "steps and digest"
        assert rest[0] == "32"
        with pytest.raises(SystemExit):
            main(["status", place, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["finished"]
        assert [member["step"] for member in found["members"]] == [32, 32], "where they ended"
        with pytest.raises(SystemExit) as ended:
            main(["join", place, str(tmp_path / "train.py")])
        assert ended.value.code == 0
        assert "there is nothing to join" in capsys.readouterr().err
    finally:
        meeting.terminate()
        _, said_last = meeting.communicate(timeout=30)
    assert meeting.returncode == 0, said_last
    assert f"workers meet at tcp://127.0.0.1:{port}/JOB" in said_last


def test_a_worker_that_nobody_would_reach_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LACONIC_BIND", raising=False)
    monkeypatch.setenv("LACONIC_RELAY", "")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("")
    for words, sentence in (
        (["join", str(tmp_path), "missing.py"], "there is no script missing.py"),
        (["join", "meet.example.org:29600/sum", str(script)], "lacks its kind: write tcp://meet.example.org:29600/sum"),
        (["join", "--relay", "meet.example.org", str(tmp_path), str(script)], "needs a host and a port"),
        (["meet", "--host", "0.0.0.0", "--folder", str(tmp_path)], "needs the job's key"),
        (["status", "redis://host/job"], "valid ones: etcd, etcds, folder, tcp"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "meet.example.org:29600").exists()


def test_a_place_that_is_not_there_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("laconic.consistency.elastic.places.tcp.ANSWER_S", 0.2)
    (tmp_path / "train.py").write_text("")
    port = free_port()
    with pytest.raises(SystemExit) as ended:
        main(["join", f"tcp://127.0.0.1:{port}", str(tmp_path / "train.py")])
    assert ended.value.code == 1, "systemd tries again, other than after bad input"
    said = capsys.readouterr().err
    assert f"tcp://127.0.0.1:{port}/job gave no answer in 0.2 s; nothing listens at port {port}" in said
    assert "this one is called 'job'" in said


def test_a_relay_that_cannot_serve_is_found_before_the_script_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setenv("LACONIC_MEETING", "")
    monkeypatch.setenv("LACONIC_RELAY", "")
    (tmp_path / "train.py").write_text("")
    relay = RelayServer("127.0.0.1", 0, meeting_secret(None, "127.0.0.1").key)

    def joined(port: int) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["join", "--relay", f"127.0.0.1:{port}", str(tmp_path / "meeting"), str(tmp_path / "train.py"), "3"])
        return int(str(ended.value.code))

    with contextlib.closing(relay):
        assert joined(relay.port) == 0
        assert started[0][2:] == ["3"]
        assert joined(port := free_port()) == 1
        assert f"the relay at 127.0.0.1:{port} gives no answer: nothing listens" in capsys.readouterr().err

        async def closed(*_: object) -> SimpleNamespace:
            """A port that a firewall keeps closed."""
            name = ("127.0.0.1", free_port())
            return SimpleNamespace(sockets=[SimpleNamespace(getsockname=lambda: name)], close=lambda: None)

        monkeypatch.setattr(RelayServer, "_door", closed)
        assert joined(relay.port) == 1
        said = capsys.readouterr().err
        assert f"open ports {relay.port} to {relay.port + PORTS} there" in said
    assert len(started) == 1


def test_a_private_address_is_told_from_a_public_place() -> None:
    assert is_private("192.168.1.5")
    assert is_private("lo")
    assert not is_private("100.101.102.103"), "of a VPN"
    assert not is_private("no-such-host.invalid")
    assert _is_public("tcp://8.8.8.8:1/a")
    assert not any(map(_is_public, ("tcp://192.168.1.1:1/a", "tcp://100.101.102.103:1/a", "folder")))


def test_where_a_worker_is_reached_is_asked_of_places_elsewhere_only() -> None:
    local = ("folder", "tcp://localhost:1/a", "tcp://[::1]:1/a", "etcd://127.0.0.1", "etcds://me:pw@localhost:1,127.0.0.2/a")
    assert all(_is_local(place) for place in local)
    far = ("tcp://10.0.0.1:1/a", "tcp://localhost.example.com:1", "etcd://127.0.0.1,10.0.0.1/a", "etcds://me:127.@a/b")
    assert not any(_is_local(place) for place in far)


def test_a_password_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("etcd3gw", reason="etcd's client is not installed")
    (tmp_path / "train.py").write_text("")
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(program))
    monkeypatch.setenv("LACONIC_MEETING", "")
    with answering(b'{"token": "x"}') as server, pytest.raises(SystemExit):
        main(["join", f"etcd://me:secret@{server}/job", str(tmp_path / "train.py")])
    assert started
    shown = capsys.readouterr()
    assert f"etcd://me@{server}/job: nobody yet" in shown.err
    assert "secret" not in shown.out + shown.err


def test_metrics_need_a_port_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        main(["status", str(tmp_path), "--prometheus", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "cannot serve metrics at" in capsys.readouterr().err


def test_what_is_shown_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path)])
    assert "nobody has met at" in capsys.readouterr().out
    meeting = Meeting(tmp_path)
    view = View(1, ((3, "127.0.0.1:1:00"), (4, "127.0.0.1:2:00")), "a job", 0.0)
    meeting.publish(view)
    meeting.record([event(view, 7, 4, "lost: its connection broke", 1)])
    said = {"worker": 3, "host": "here", "reached": "by relay", "step": 7, "seconds_per_step": 0.25,
            "wait_share": 0.5, "sent_nbytes": 2048, "rejoined": 0}  # fmt: skip
    meeting.write_status(3, said)
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "waits for" not in shown
    for text in ("2 members, view 1", "0.25", "50%", "worker 4 lost: its connection broke", "not yet"):
        assert text in shown
    lines = exposition(collect(meeting)).splitlines()
    assert "laconic_members 2" in lines
    assert 'laconic_step{worker="3"} 7' in lines
    meeting.write_status(3, {**said, "step": 0, "waits_for": 3})
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path)])
    assert "the first step waits for 3 workers: 2 so far" in capsys.readouterr().out
    meeting.finish(9)
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path), "--watch"])
    assert "finished, view 1" in capsys.readouterr().out, "it ends with the job"
