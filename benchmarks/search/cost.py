"""What a search itself takes: milliseconds a trial, and how well several processes are used on uneven trials.

Caller: `search.py`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from laconic.searching.api import search
from laconic.searching.trial import Trial
from laconic.statistics import median

ROUNDS = 3


def uneven(trial: Trial) -> float:
    """Waits from 0.05 to 0.35 s, by its number."""
    time.sleep(0.05 + 0.3 * ((trial.number * 7) % 10) / 9)
    return float(trial.params["x"])


def nothing(trial: Trial) -> float:
    """Costs nothing."""
    return float(trial.params["x"])


def cost(trials: int = 100) -> list[dict[str, Any]]:
    """What the search itself takes with the journal, and how well four processes are used on uneven trials."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for method in ("random", "evolution", "tpe"):
            found = [_overhead(method, trials, Path(folder) / f"{method}{number}") for number in range(ROUNDS)]
            clock, processor = ([each[k] for each in found] for k in (0, 1))
            rows.append({"what": "overhead", "storage": "journal", "method": method, "trials": trials,
                         "seconds_a_trial": median(clock).value, "cpu_seconds_a_trial": median(processor).value,
                         "rounds": found})  # fmt: skip
        one = _speed(1, "random", Path(folder))
        for method, how in (("random", "asynchronous"), ("pbt(4, sync=true)", "synchronous")):
            speed = _speed(4, method, Path(folder))
            rows.append({"what": "parallel", "workers": 4, "how": how, "method": method, "trials_per_s": speed,
                         "one_worker_trials_per_s": one, "efficiency": speed / (4 * one)})  # fmt: skip
    return rows


def _overhead(method: str, trials: int, folder: Path) -> tuple[float, float]:
    """Seconds a trial by the clock, and of this processor, which other programs do not lengthen."""
    begun, used = time.perf_counter(), time.process_time()
    search(nothing, "x = float(0, 1)", method, trials, folder=folder)
    return (time.perf_counter() - begun) / trials, (time.process_time() - used) / trials


def _speed(workers: int, method: str, folder: Path) -> float:
    """Trials in a second, from when every process has made one, over whole rounds of all lengths."""
    times: list[float] = []
    search(uneven, "x = float(0, 1)", method, 20 * workers, parallel=workers, folder=folder / f"{workers}{method[:3]}",
           note=lambda trial, spec: times.append(time.perf_counter()))  # fmt: skip
    skip = 2 * workers
    return (len(times) - 1 - skip) / (times[-1] - times[skip])
