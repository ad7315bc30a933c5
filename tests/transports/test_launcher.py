"""Local jobs: what their ranks are forked from, and how an end is told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from laconic.errors import BadInput
from laconic.transports.launcher import LocalJob, RankFailed, run_local

pytestmark = pytest.mark.processes
NEEDED = ("numba", "torch._dynamo", "laconic.codecs.eightbit", "laconic.consistency.distribute")


def _found() -> tuple[list[str], int, float]:
    """What is imported at a rank's beginning, the threads of what it was forked from, and the first kernel's cost."""
    import torch

    import laconic

    imported = [name for name in NEEDED if name in sys.modules]
    threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    begun = time.process_time()
    laconic.codec("linear8").encode(torch.ones(10))
    return imported, threads, time.process_time() - begun


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_ranks_are_forked_with_all_they_need_from_a_process_of_one_thread() -> None:
    for imported, threads, _ in run_local(2, _found, timeout_s=60):
        assert imported == list(NEEDED)
        assert threads == 1, "what a thread holds at the fork stays held for ever"


def test_the_first_kernel_of_a_rank_does_not_wait_for_numba() -> None:
    run_local(1, _found, timeout_s=60)  # compiles it where it has never been
    _, _, seconds = run_local(1, _found, timeout_s=60)[0]
    assert seconds < 0.4  # 0.03 when it is loaded; 0.7 when the rank loads Numba's tables itself


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
