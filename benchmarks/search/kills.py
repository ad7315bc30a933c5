"""Kill tests: SIGKILL of a worker, of the coordinator, of the database's connections, at moments by chance.

Callers: `search.py`, `--part kills`, and a small version in the tests. A search runs in a process of its own
and is resumed whenever it was killed. At the end every trial that had ended is still there with its value (nothing
lost), and no point was completed twice (nothing doubled).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.search.database import Server, postgres, why_absent
from laconic.errors import LaconicError
from laconic.searching.api import Result, load
from laconic.searching.space import Space
from laconic.searching.spec import SearchSpec
from laconic.searching.trial import Trial

KINDS = ("worker", "coordinator", "connection")
SPACE = "a = int(1, 12); b = int(1, 12)"
TRIALS, PARALLEL, KILLS_A_SEARCH = 40, 2, 8
LONGEST_S = 300.0  # without any progress the search hangs, which is a failure too
_RESUME = "import sys, pathlib; from laconic.searching import resume; resume(pathlib.Path(sys.argv[1]))"


def value(a: int, b: int) -> float:
    """What is searched for."""
    return -abs(a - 7) - abs(b - 3) / 10


def slow(trial: Trial) -> float:
    """Some hundredths of a second; each beginning and end is a line in the search's folder."""
    log = trial.folder / "evaluations"
    _append(log, f"begin {trial.number} {os.getpid()}")
    time.sleep(0.02 + 0.01 * (trial.number % 7))
    _append(log, f"end {trial.number} {os.getpid()}")
    return value(**trial.params)


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())  # one write, so that lines of several processes stay whole
    finally:
        os.close(descriptor)


@dataclass
class Killed:
    """One search that was killed again and again.

    Attributes:
        kills: how often, by kind.
        lost: trials that had ended and are not there, or have another value.
        doubled: points that were completed more than once.
        repeated: evaluations that were made again because their end had not been written.
        done: trials that came to their end.
    """

    storage: str
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    lost: int = 0
    doubled: int = 0
    repeated: int = 0
    done: int = 0
    trials: int = TRIALS
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing was lost or doubled, and the search came to its end."""
        return not self.lost and not self.doubled and self.done == self.trials and not self.why


def kill_tests(kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill searches so many times, on a journal and, where there is PostgreSQL, on a database."""
    chance, absent = random.Random(seed), why_absent()
    kinds = [kind for kind in KINDS if kind != "connection" or not absent]
    plan = [kinds[number % len(kinds)] for number in range(kills)]
    chance.shuffle(plan)
    searches: list[Killed] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = None if absent else stack.enter_context(postgres())
        while plan:
            on_journal = server is None or (len(searches) % 2 == 0 and set(plan) != {"connection"})
            searches.append(_killed(Path(folder) / f"search{len(searches)}", None if on_journal else server, plan,
                                    chance))
            if searches[-1].why:
                break  # one that cannot be made takes no kills out of the plan, and the next will not either
    total = {kind: sum(each.kills[kind] for each in searches) for kind in KINDS}
    return {
        "kills": sum(total.values()), "by_kind": total, "seed": seed, "holds": all(each.holds for each in searches),
        "lost": sum(each.lost for each in searches), "doubled": sum(each.doubled for each in searches),
        "left_out": absent, "searches": [{**vars(each), "holds": each.holds} for each in searches],
    }  # fmt: skip


def _killed(folder: Path, server: Server | None, plan: list[str], chance: random.Random) -> Killed:
    """One search; the kills that suit it are taken out of the plan."""
    spec = SearchSpec(
        "benchmarks.search.kills:slow", Space.read(SPACE), "evolution(population=8, sample=3)", TRIALS,
        seed=chance.randrange(10**6), parallel=PARALLEL, folder=folder, storage="" if server is None else server.url,
        retries=100, give_up=1000,
    )  # fmt: skip
    spec.save()
    found = Killed("journal" if server is None else "postgresql")
    ended: dict[int, float] = {}
    process = _started(folder)
    try:
        for kind in [kind for kind in plan if server is not None or kind != "connection"][:KILLS_A_SEARCH]:
            if not _goes_on(process, folder, chance.randint(1, 2)):
                break
            time.sleep(chance.random() * 0.1)
            if kind == "worker":
                if not _kill_worker(folder, chance):
                    continue
            elif kind == "coordinator":
                process.kill()
                process.wait()
                ended |= _ended(load(folder))
                process = _started(folder)
            else:
                assert server is not None
                server.break_connections()
            found.kills[kind] += 1
            plan.remove(kind)
        code = process.wait(timeout=LONGEST_S)
        found.why = f"the search ended with exit code {code}" if code else ""
    except (subprocess.TimeoutExpired, LaconicError) as error:
        found.why = str(error)
    finally:
        process.kill()
        process.wait()
    return _judged(found, folder, ended)


def _judged(found: Killed, folder: Path, ended: dict[int, float]) -> Killed:
    result = load(folder)
    now, done = _ended(result), [t for t in result.history.trials.values() if t.state == "done"]
    points = [tuple(trial.point.values()) for trial in done]
    wrong = [number for number, score in now.items() if score != value(**result.history.trials[number].point)]
    found.lost = len(wrong) + sum(now.get(number) != score for number, score in ended.items())
    found.doubled, found.done = len(points) - len(set(points)), len(done)
    finished = [line.split()[1] for line in _lines(folder) if line.startswith("end")]
    found.repeated = len(finished) - len(done)
    return found


def _ended(result: Result) -> dict[int, float]:
    return {t.number: t.score for t in result.history.trials.values() if t.state == "done" and t.score is not None}


def _started(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _RESUME, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _lines(folder: Path) -> list[str]:
    path = folder / "evaluations"
    return path.read_text().splitlines() if path.exists() else []


def _goes_on(process: subprocess.Popen[bytes], folder: Path, more: int) -> bool:
    """Wait for so many more lines; False where the search has ended."""
    deadline, before = time.monotonic() + LONGEST_S, len(_lines(folder))
    while len(_lines(folder)) < before + more:
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("a search that makes no progress", LONGEST_S)
        time.sleep(0.005)
    return True


def _kill_worker(folder: Path, chance: random.Random) -> bool:
    """SIGKILL one of the processes that evaluate a trial now; False where there is none."""
    busy: dict[str, str] = {}
    for line in _lines(folder):
        what, number, process = line.split()
        busy.pop(number, None) if what == "end" else busy.update({number: process})
    alive = [int(each) for each in sorted(set(busy.values())) if Path(f"/proc/{each}").exists()]
    try:
        os.kill(chance.choice(alive), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return False
    return True
