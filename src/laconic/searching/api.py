"""`laconic.search`: find the parameters with which an objective is best.

Callers: users and the command line.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Never

from laconic.errors import BadInput
from laconic.searching import samplers
from laconic.searching.history import History, Seen, history_of
from laconic.searching.named_spaces import SPACES
from laconic.searching.optimize import ABANDONED, Note, Optimization
from laconic.searching.pool import Pool
from laconic.searching.space import Point, Space
from laconic.searching.spec import FILE, SearchSpec
from laconic.searching.storage import opened_study
from laconic.searching.trial import NamedObjective, Objective
from laconic.storage.files import folder_of, writing
from laconic.storage.run_folders import make_folder, only_one


@dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        spec: what was asked.
        history: every trial.
    """

    spec: SearchSpec
    history: History

    @property
    def best(self) -> Seen | None:
        """The best trial; None where all failed."""
        return self.history.best

    @property
    def params(self) -> Point:
        """The best trial's parameters.

        Raises:
            BadInput: no trial came to its end.
        """
        if self.best is None:
            raise BadInput("no trial came to its end, so there is no best one")
        return self.best.point

    @property
    def stretches(self) -> list[Point]:
        """The parameters of the trials that the best one goes back to, the first one's first, its own last."""
        trial, found = self.best, []
        while trial is not None:
            found.append(trial.point)
            trial = None if trial.proposal.parent is None else self.history.trials.get(trial.proposal.parent)
        return found[::-1]

    @property
    def value(self) -> float:
        """The best trial's value."""
        return math.nan if self.best is None or self.best.score is None else self.spec.sign * self.best.score

    @property
    def tuning_runs(self) -> int:
        """The number of all trials, failed and stopped ones included, for the record of a later training."""
        return len(self.history)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        trials = [
            {"number": t.number, "params": t.point, "value": None if t.score is None else self.spec.sign * t.score,
             "state": t.state, "seconds": t.seconds, "samples": t.samples, "why": t.why, "parent": t.proposal.parent,
             "attempt": t.attempts}
            for t in self.history.trials.values()
        ]  # fmt: skip
        best = self.best
        return {
            "objective": self.spec.objective, "method": self.spec.method, "rule": self.spec.rule,
            "seed": self.spec.seed, "folder": str(self.spec.folder), "tuning_runs": self.tuning_runs,
            "best": None if best is None else {"number": best.number, "value": self.value, "params": best.point},
            "trials": trials,
        }  # fmt: skip


def search(
    objective: str | Callable[..., float],
    space: Space | Mapping[str, Any] | str | Path | None = None,
    method: str = "tpe",
    trials: int = 50,
    *,
    note: Note = lambda trial, spec: None,
    maximize: bool | None = None,
    rule: str | None = None,
    seed: int | None = None,
    parallel: int | None = None,
    workers: int | None = None,
    storage: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    start: Sequence[Mapping[str, Any]] | None = None,
    retries: int | None = None,
    give_up: int | None = None,
    limit_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    command: str | None = None,
    **unknown: Never,
) -> Result:
    """Find the parameters with which an objective is best.

    >>> import tempfile
    >>> import laconic
    >>> def objective(trial):
    ...     return -(trial.params["x"] - 2) ** 2
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = laconic.search(objective, "x = float(0, 4)", "random", 20, folder=folder)
    >>> len(found.history), -0.5 < found.value <= 0
    (20, True)

    Args:
        objective: a function of a `Trial` that returns a number, module:function, or the name of a workload or table.
        space: a `Space`, its table, a TOML file, a line of text, or a name such as convolutions; None for a workload's
            or table's own.
        method: such as "tpe" or "evolution(population=30)".
        trials: how many are made; a search in a folder that has some goes on to this number.
        note: called with each trial that has ended, and the search's spec.
        maximize: whether higher values are better. Default: the workload's own, else True.
        rule: of early stopping, such as "median" or "halving". Default: "none".
        seed: of the method's draws and of the trials' seeds. Default: 0.
        parallel: processes that evaluate trials at the same time; 0 evaluates in this one. Default: 1 for a workload,
            else 0.
        workers: ranks of each trial. Default: 1.
        storage: address of an Optuna storage, such as "postgresql://…". Default: a journal in the folder.
        folder: of the search. Default: a new one in runs/.
        start: points to try first. Default: none.
        retries: how often a failed trial is tried again. Default: 1.
        give_up: so many failures one after the other end the search. Default: 10.
        limit_s: a trial that takes longer has failed; needs parallel=1 or more. Default: no limit.
        options: of a workload: its epochs, codec and link.
        command: what the user typed, for the record.
        unknown: always empty. An unknown name raises UnknownName and suggests the closest match.

    Raises:
        BadInput: an empty or contradictory space, a method that cannot search it, a storage that cannot be reached.
    """
    every = {
        "maximize": maximize, "rule": rule, "seed": seed, "parallel": parallel, "workers": workers, "storage": storage,
        "start": start, "retries": retries, "give_up": give_up, "limit_s": limit_s, "options": options,
        "command": command, **unknown,
    }  # fmt: skip
    given = {name: value for name, value in every.items() if value is not None}
    called, name = resolve(objective, given)
    called = suited(called, method)
    space = Space.read(_own_space(called) if space is None else SPACES.get(str(space), space))
    if isinstance(called, NamedObjective):
        given = {**called.settings(space), **given}
    spec = SearchSpec.of(name, space, {**given, "method": method, "trials": trials})
    return run(replace(spec, folder=folder_of(folder) if folder else _new_folder(name)), called, note)


def resume(folder: Path, objective: Callable[..., float] | None = None, trials: int | None = None,
           note: Note = lambda trial, spec: None) -> Result:  # fmt: skip
    """Resume the search in a folder, to its own number of trials or another.

    Raises:
        RecordError: there is no search.
    """
    spec = SearchSpec.load(folder)
    spec = spec if trials is None else replace(spec, trials=trials)
    if objective is None:
        objective, _ = resolve(spec.objective, {"options": spec.options, "workers": spec.workers})
    return run(spec, objective, note)


def _own_space(objective: Objective) -> Space:
    own = getattr(objective, "space", None)
    if not isinstance(own, Space):
        raise BadInput("name a space: only workloads and tables have one of their own")
    return own


def suited(objective: Objective, method: str) -> Objective:
    """The objective as a method needs it: a workload's trials go on from others, or are evaluated without training."""
    return objective.suited(samplers.build(method)) if isinstance(objective, NamedObjective) else objective


def run(spec: SearchSpec, objective: Objective, note: Note = lambda trial, spec: None) -> Result:
    """Run the remaining trials of a search.

    Raises:
        BadInput: the folder holds another search, or one that is still running.
    """
    objective = suited(objective, spec.method)
    with writing(spec.folder, "no search was touched"):
        spec.folder.mkdir(parents=True, exist_ok=True)
    ranks = 1 if isinstance(objective, NamedObjective) and objective.starts_ranks else spec.workers
    with contextlib.ExitStack() as stack:
        if not spec.storage:
            stack.enter_context(only_one(spec.folder))
        _check_same(spec)
        pool = Pool(objective, spec.parallel, ranks, spec.limit_s)
        study = stack.enter_context(opened_study(spec.address, spec.study, spec.maximize))
        spec.save()  # before processes are started, which takes seconds: whoever is interrupted then can resume
        stack.enter_context(pool)
        return Result(spec, Optimization(study, spec, note).run(pool))


def _check_same(spec: SearchSpec) -> None:
    """Raise BadInput if the folder holds another search's trials, which would be mistaken for this one's."""
    if not (spec.folder / FILE).exists():
        return
    before, now = SearchSpec.load(spec.folder).to_json(), spec.to_json()
    for name in ("objective", "space", "method", "maximize", "options"):
        if before[name] != now[name]:
            text = f"{spec.folder} holds a search with another {name}: {before[name]}, not {now[name]}"
            raise BadInput(f"{text}; name another folder")


def repeat(found: Result, repeats: int, note: Note = lambda trial, spec: None) -> list[Result]:
    """The same search with the next seeds, `repeats` in all, in folders below its own; what is there goes on.

    A folder's name is that of its search in a storage, which other searches may share: so it names this one, too.

    Raises:
        BadInput: fewer than one.
    """
    if repeats < 1:
        raise BadInput(f"a search is made once or more often, got {repeats} repeats")
    spec = found.spec
    objective, _ = resolve(spec.objective, {"options": spec.options, "workers": spec.workers})
    return [
        run(replace(spec, seed=spec.seed + number, folder=spec.folder / "repeats" / f"{spec.folder.name}-{number}"),
            objective, note)
        for number in range(1, repeats)
    ]  # fmt: skip


def load(folder: Path) -> Result:
    """The search in a folder, as far as it has come."""
    spec = SearchSpec.load(folder)
    with opened_study(spec.address, spec.study, spec.maximize) as study:
        return Result(spec, history_of(study))


def resolve(objective: str | Callable[..., float], options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the objective and its name."""
    if not isinstance(objective, str):
        if not callable(objective):
            raise BadInput(f"an objective is a function or a name, got {type(objective).__name__}")
        return objective, getattr(objective, "__qualname__", type(objective).__name__)
    module, colon, name = objective.partition(":")
    if colon and name.isidentifier():
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise BadInput(f"the objective '{objective}' cannot be imported: {error}") from error
        if getattr(found, "__annotations__", {}).get("return") not in ("Workload", _workload()):
            return found, objective
    for entry in entry_points(group="laconic.objectives"):  # of applications, such as the laboratory's workloads
        return entry.load()(objective, options), objective
    raise BadInput(f"an objective is a function or module:function here, got '{objective}'")


def _workload() -> type:
    from laconic.workloads import Workload

    return Workload


def _new_folder(name: str) -> Path:
    return make_folder("search-" + "".join(c if c.isalnum() else "-" for c in name).strip("-"), "runs")


__all__ = ["ABANDONED", "Result", "load", "resolve", "resume", "run", "search"]
