"""Workers whose torchrun was killed end within the time-out, and say why in a few lines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
TIMEOUT_S = 4.0
PROGRAM = f"""
import os, sys, time
from pathlib import Path
import torch
import laconic
world = laconic.init(sys.argv[1], timeout_s={TIMEOUT_S})
laconic.all_reduce(torch.ones(100))
Path(f"pid-{{world.rank}}").write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
    if sys.argv[2] == "busy":
        laconic.all_reduce(torch.ones(100))
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(done: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to look into")
@pytest.mark.parametrize(("engine", "what"), [("gloo", "busy"), ("zmq", "idle")])
def test_workers_end_when_torchrun_was_killed(engine: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen([*command, engine, what], cwd=tmp_path, stdout=log, stderr=log)
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    try:
        assert _wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60), _text(tmp_path)
    finally:
        agent.kill()
        agent.wait()
    workers = [int(file.read_text()) for file in files]
    ended = _wait_until(lambda: not any(map(_is_running, workers)), TIMEOUT_S + 15)
    for worker in filter(_is_running, workers):
        os.kill(worker, signal.SIGKILL)
    assert ended, _text(tmp_path)
    text = _text(tmp_path)
    assert len(text) < 50_000
    if what == "busy":
        assert re.search(r"PeerLost: .*(launcher was lost|peer [01])", text), text


def _text(folder: Path) -> str:
    return (folder / "log").read_text()
