"""A search's history as an Optuna study in memory, for Optuna's samplers and pruners.

Callers: the methods and rules that are Optuna's. Invariant: the study holds what the history holds, scores and not
values, so that its direction is always "maximize".
"""

from __future__ import annotations

import warnings
from typing import Any

from laconic.errors import MissingExtra
from laconic.search.history import History, Seen
from laconic.search.space import Choice, Float, Int, Parameter, Point, Space

try:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import FrozenTrial, TrialState, create_trial
except ImportError as error:
    raise MissingExtra("optuna", "search") from error

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
STATES = {
    "running": TrialState.RUNNING, "done": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "failed": TrialState.FAIL,
}  # fmt: skip


def distribution(each: Parameter) -> BaseDistribution:
    """A parameter as Optuna names it."""
    if isinstance(each, Float):
        return FloatDistribution(each.low, each.high, log=each.log)
    if isinstance(each, Int):
        return IntDistribution(each.low, each.high, step=each.step)
    assert isinstance(each, Choice)
    return CategoricalDistribution(list(each.values))


def frozen(trial: Seen, space: Space, attributes: dict[str, Any] | None = None) -> FrozenTrial:
    """A trial as Optuna keeps it, with its scores as values."""
    return create_trial(
        state=STATES[trial.state], params=trial.point,
        distributions={name: distribution(space.parameters[name]) for name in trial.point},
        value=trial.score if trial.ended else None,
        intermediate_values=dict(trial.reports), user_attrs=attributes or {},
    )  # fmt: skip


class Mirror:
    """A study that follows a history."""

    def __init__(self, space: Space) -> None:
        self.space = space
        # named, since Optuna's Hyperband divides trials by a checksum of the name, and its own is drawn at random
        self.study = optuna.create_study(direction="maximize", study_name="laconic")
        self._storage, self._id = self.study._storage, self.study._study_id
        self._known: dict[int, tuple[int, str, int]] = {}  # number -> id here, state, reports

    def follow(self, history: History) -> None:
        """Take over what is new in the history."""
        for number, trial in history.trials.items():
            here, state, reports = self._known.get(number, (-1, "", 0))
            if here < 0:
                here = self._storage.create_new_trial(self._id, frozen(trial, self.space))
            elif state == "running":
                for step, score in list(trial.reports.items())[reports:]:
                    self._storage.set_trial_intermediate_value(here, step, score)
                if trial.state != "running":
                    values = [trial.score] if trial.ended and trial.score is not None else None
                    self._storage.set_trial_state_values(here, STATES[trial.state], values)
            else:
                continue
            self._known[number] = (here, trial.state, len(trial.reports))

    def ask(self, sampler: optuna.samplers.BaseSampler) -> Point:
        """The point that a sampler suggests; it leaves a failed trial behind, which samplers pass over."""
        self.study.sampler = sampler
        trial = self.study.ask()
        point = self.space.build(lambda name, each: trial._suggest(name, distribution(each)))
        self.study.tell(trial, state=TrialState.FAIL)
        return point

    def trial(self, number: int) -> FrozenTrial:
        """One trial as the study has it."""
        return self._storage.get_trial(self._known[number][0])
