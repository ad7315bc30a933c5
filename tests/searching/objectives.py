"""Objectives that other processes can import."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

from laconic.searching import Trial

CHOICES = "a = choice(['x', 'y', 'z']); b = choice([1, 2, 3]); c = choice(['p', 'q'])"
MIXED = "rate = log(0.001, 1); mode = choice(['sync', 'local']); period = int(1, 4) when mode = local"


def score(trial: Trial) -> float:
    """Best at y, 2, p, or at a rate of 0.1; anything else is worse."""
    params = trial.params
    if "rate" in params:
        return -abs(math.log10(params["rate"]) + 1) - 0.1 * params.get("period", 3)
    return float((params["a"] == "y") + (params["b"] == 2) + (params["c"] == "p"))


def counted(trial: Trial) -> float:
    """The same, and a line for each evaluation in a file that the environment names."""
    with open(os.environ["COUNTED"], "a") as file:
        file.write(f"{trial.number} {trial.params}\n")
    return score(trial)


def slow(trial: Trial) -> float:
    """The same, in some hundredths of a second."""
    time.sleep(0.02 + 0.03 * (trial.number % 3))
    return counted(trial)


def dies_at_first(trial: Trial) -> float:
    """Every third trial kills its own process the first time."""
    if trial.attempt == 1 and trial.number % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return score(trial)


def fails(trial: Trial) -> float:
    """Raises, returns NaN, a text or nothing, or a value, in turn."""
    kind = trial.number % 5
    if kind == 0:
        raise ValueError("on purpose")
    return [math.nan, "text", None, score(trial)][kind - 1]  # type: ignore[return-value]


class Unwilling:
    """Cannot be a float, and cannot be sent."""

    def __float__(self) -> float:
        raise RuntimeError("on purpose")

    def __reduce__(self) -> str:
        raise TypeError("on purpose")


class Score(Unwilling):
    """A float that cannot be sent."""

    def __float__(self) -> float:
        return 1.0


def strange(trial: Trial) -> float:
    """Returns what no float can hold, what cannot be sent to another process, or a value."""
    return [10**400, lambda: None, Unwilling(), Score()][trial.params["b"]]  # type: ignore[return-value]


def curve(trial: Trial) -> float:
    """Rises to the trial's own level over twenty steps."""
    value = 0.0
    for step in range(20):
        value = trial.params["level"] * (1 - (step + 1) ** -1.0)
        if trial.report(value, step):
            break
    return value


def inherits(trial: Trial) -> float:
    """Counts the generations before it."""
    before = trial.weights()
    count = 0 if before is None else before["count"] + 1
    trial.keep({"count": count, "number": trial.number})
    return float(count)


def on_ranks(trial: Trial) -> float:
    """All ranks see the same parameters and the same answers; one dies where the parameters say so."""
    import torch

    import laconic

    with laconic.init() as world:
        mine = torch.tensor([float(trial.params["b"]), float(trial.seed % 1000)])
        everyone = laconic.all_gather(mine, group=world)
        assert bool((everyone == everyone[0]).all())
        if trial.params["b"] == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        stopped = trial.report(mine[0].item(), 0)
        laconic.barrier(group=world)
        assert stopped in (True, False)
    return float(trial.params["b"])


def lines(path: Path) -> list[str]:
    """What `counted` wrote."""
    return path.read_text().splitlines() if path.exists() else []
