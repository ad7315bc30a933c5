"""What ranks measured becomes one trial."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laconic.consistency import get, names
from laconic.statistics import median
from laconic.transports.world import init
from laconic.workloads import Changes
from laconic_lab.records.record import TrialRecord
from laconic_lab.runs.spec import TrialSpec, configuration
from laconic_lab.runs.trainer import Ended, LockstepTraining
from laconic_lab.runs.trial import Evaluation, Figures, StepFigures, TrialOutcome, assemble

STEPS = 48


def _assembled(mode: str, seconds: np.ndarray) -> TrialRecord:
    """The trial of two ranks whose steps took so long, with an evaluation in the middle and at the end."""
    values = np.ones((*seconds.shape, len(StepFigures._fields)))
    values[:, :, StepFigures._fields.index("seconds")] = seconds
    tests = [Evaluation(step, 0.5, 0.9, 0.1, True) for step in (seconds.shape[1] // 2, seconds.shape[1])]
    outcome = TrialOutcome(0.5, tests, lambda step: 10 * step, 100, [], "", True)
    return assemble(configuration(f"distribute:none@{mode}", 2), 0, 0, Figures(values), outcome)


@pytest.mark.parametrize("mode", sorted({spec for name in names() for spec in get(name).examples}))
def test_every_mode_makes_a_trial(mode: str) -> None:
    trial = _assembled(mode, np.full((2, STEPS), 0.25))
    assert (trial.steps, trial.step_seconds_median, trial.seconds_total) == (STEPS, 0.25, 0.5 + 0.25 * STEPS)


class _Interface:
    """Sends a byte whenever it is asked."""

    is_used = True

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def restart(self) -> None:
        self._seen.append("count anew")

    def taken(self) -> float:
        return 1.0


def test_the_exchange_of_an_epochs_last_step_is_its_own_and_an_evaluation_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    with init() as world:
        training = LockstepTraining(TrialSpec("digits-mlp", configuration("single", 1), 0, Changes(2)), world)
        training.sent = _Interface(seen)  # type: ignore[assignment]
        for name in ("catch_up", "finish"):
            monkeypatch.setattr(training.trainee, name, lambda name=name: seen.append(f"{name} {training.step}"))
        monkeypatch.setattr(training, "evaluate", lambda: seen.append(f"evaluate {training.step}"))
        monkeypatch.setattr(training, "ended", lambda: Ended(training.step))
        assert training.run() == Ended(46)
    begin, first = ["count anew"], ["catch_up 23", "evaluate 23", "count anew"]
    assert seen == [*begin, *first, "finish 46", "evaluate 46", "count anew"]
    assert [row.sent for row in training.rows] == 2 * [*22 * [1.0], 2.0]


def test_a_delay_counts_once() -> None:
    """A rank that is late in its third step is waited for by the other in a later one."""
    seconds = np.full((2, STEPS), 1.0)
    seconds[1, 2] = seconds[0, 7] = 5.0
    trial = _assembled("local(8)", seconds)
    assert math.isclose(trial.seconds_total, 0.5 + STEPS + 4)
    assert math.isclose(trial.curve[-1].seconds, trial.seconds_total)


def test_the_steps_of_a_period_are_one_measurement() -> None:
    """Means of eight steps are six values here, not 48: the interval is as wide as theirs."""
    seconds = np.random.default_rng(0).lognormal(size=STEPS)
    trial = _assembled("local(8)", np.stack([seconds, seconds]))
    means = seconds.reshape(-1, 8).mean(1)
    assert trial.step_seconds_interval == pytest.approx(median(means.tolist()).interval)
