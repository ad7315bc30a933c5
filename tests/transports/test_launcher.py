"""Local jobs: what their ranks are forked from, and how an end is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from laconic.errors import BadInput
from laconic.transports.launcher import LONGEST_SOCKET_FOLDER, LocalJob, RankFailed, run_local

pytestmark = pytest.mark.processes
# numba.np.arraymath is imported with the tables that the first kernel of a process reads
NEEDED = ["numba.np.arraymath", "torch._dynamo", "laconic.codecs.eightbit", "laconic.consistency.distribute"]
forks = pytest.mark.skipif(
    len(tempfile.gettempdir()) > LONGEST_SOCKET_FOLDER or not Path("/proc/self/task").is_dir(),
    reason="ranks are not forked here, or there is no /proc to look into",
)


def _found() -> tuple[list[str], int]:
    """What is imported at a rank's beginning, and the threads of what it was forked from."""
    imported = [name for name in NEEDED if name in sys.modules]
    return imported, len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


@forks
def test_ranks_are_forked_with_all_they_need_from_a_process_of_one_thread() -> None:
    for imported, threads in run_local(2, _found, timeout_s=60):
        assert imported == NEEDED
        assert threads == 1, "what a thread holds at the fork stays held for ever"


@forks
def test_the_process_that_ranks_are_forked_from_outlives_a_signal_to_all_and_other_children_do_not() -> None:
    [server] = run_local(1, os.getppid, timeout_s=60)
    os.kill(server, signal.SIGTERM)
    os.kill(server, signal.SIGINT)
    assert run_local(1, os.getppid, timeout_s=60) == [server]
    for _ in range(20):  # also at once, before it has come to itself
        other = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
        other.start()
        other.terminate()
        other.join(10)
        assert other.exitcode == -signal.SIGTERM


def _refuse() -> None:
    raise BadInput("a sentence for the user")


def _end() -> None:
    os._exit(3)


def test_an_end_is_told_in_a_sentence_that_names_the_rank() -> None:
    with pytest.raises(RankFailed, match=r"^rank 0: a sentence for the user$"):
        run_local(1, _refuse, timeout_s=60)
    with pytest.raises(RankFailed, match=r"^rank 0 ended with exit code 3$"):
        run_local(1, _end, timeout_s=60)


def test_a_rank_that_is_silent_too_long_is_ended() -> None:
    job = LocalJob(1, time.sleep, (60,))
    [outcome] = job.outcomes(timeout_s=0.5)
    assert outcome.exitcode == -9
    assert not job.processes[0].is_alive()
