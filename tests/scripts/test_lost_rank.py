"""What a terminal shows of a lost rank where no logging is set up, and the script leaves without closing anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.transports.launcher import Host, rank_variables

PROGRAM = Path(__file__).with_name("lost_rank_program.py")


@pytest.mark.processes
def test_a_lost_rank_is_said_once_and_leaving_is_quiet() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command, quiet = [sys.executable, str(PROGRAM), "stale(2)"], subprocess.DEVNULL
    ranks = [
        subprocess.Popen(command, env={**os.environ, **own}, stdout=quiet, stderr=subprocess.PIPE, text=True)
        for own in rank_variables([Host()] * 3, store)
    ]
    try:
        said = [process.communicate(timeout=100)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0, -signal.SIGKILL]
    for rank, text in enumerate(said[:2]):
        assert text.count(f"[rank {rank}/3] stale: goes on without rank 2, which is lost") == 1, text
        assert "Traceback" not in text
