"""Trials that train a workload: each is a run of the laboratory, with its record, metrics and checkpoints.

Callers: `laconic search WORKLOAD`. What a parameter changes goes by its name:

    learning_rate, batch, epochs          of the workload
    model, momentum, weight_decay         of the workload
    optimizer                             sgd, momentum, adam, adamw, rmsprop or yellowfin in place of its own
    codec, consistency, algorithm         of the configuration
    any name in braces                    in the workload's spec or in a value: shakespeare-gpt(layers={layers}),
                                          local({period})

Trials are judged on samples held out of the training data, so that the test data stays unseen by the search; only what
is found is tested on it. Under a method whose trials go on from others (pbt, enas) a trial is a stretch of training at
a constant rate: it begins with the weights that its parent kept, as far as they fit its model, and momentum begins
anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from laconic.errors import BadInput, UnknownName
from laconic.searching.parameters import Choice, Float
from laconic.searching.samplers import Sampler
from laconic.searching.space import Space
from laconic.searching.trial import NamedObjective, Objective, Trial
from laconic.storage.checkpoints import CheckpointFiles
from laconic.transports.launcher import RankFailed
from laconic.workloads import Changes, Workload, get
from laconic.workloads.data.split import Dataset, Split, held_out
from laconic.workloads.optimizers import OPTIMIZERS, constant
from laconic_lab.records.record import TrialRecord
from laconic_lab.runs.run import Run
from laconic_lab.runs.spec import RunSpec, configuration, with_mode
from laconic_lab.runs.trainer import Scored
from laconic_lab.runs.trial import failed_trial
from laconic_lab.runs.workers import Workers
from laconic_lab.searches.neuroevolution import EvolvedObjective

CHANGES = ("learning_rate", "batch", "epochs")
FIELDS = ("model", "optimizer", "momentum", "weight_decay")
CONFIGURATION = ("codec", "consistency", "algorithm")
HELD_OUT = 0.2  # of the training data, to judge trials by


class HeldOut(Workload):
    """A workload that is tested on a part of its training data."""

    def load(self, folder: str | Path | None = None, *, download: bool = True) -> Dataset:
        data = super().load(folder, download=download)
        train, test = held_out(len(data.train), HELD_OUT)
        return replace(data, title=f"{data.title}, {HELD_OUT:.0%} of its training data held out",
                       train=_part(data.train, train), test=_part(data.train, test))  # fmt: skip


def _part(split: Split, numbers: torch.Tensor) -> Split:
    if not isinstance(split.x, torch.Tensor):
        raise BadInput("a search needs dense samples to hold some of them out; this workload's are sparse")
    return Split(split.x[numbers], split.y[numbers])


def changed(
    base: str, held_out: bool = True, model: str = "", optimizer: str = "", momentum: float = -1.0,
    weight_decay: float = -1.0, steady: bool = False,
) -> Workload:  # fmt: skip
    """A workload with other fields, by a spec that every worker can read; a steady one keeps its rate to the end."""
    workload = get(base)
    if optimizer:
        if optimizer not in OPTIMIZERS:
            raise UnknownName("optimiser", optimizer, OPTIMIZERS)
        tunes = optimizer == "yellowfin"  # its rate is a factor on the one that it finds
        workload = replace(workload, optimizer=OPTIMIZERS[optimizer], optimizer_name=optimizer,
                           learning_rate=1.0 if tunes else workload.learning_rate)  # fmt: skip
    given = {"momentum": momentum, "weight_decay": weight_decay}
    options = {name: value for name, value in given.items() if value >= 0}
    if options:
        try:
            workload.optimizer(torch.nn.Linear(1, 1).parameters(), 0.1, **options)
        except TypeError as error:
            raise BadInput(f"the optimiser of {base} takes no {' or '.join(options)}") from error
        words = ", ".join(f"{name} {value:g}" for name, value in options.items())
        workload = replace(workload, optimizer=partial(workload.optimizer, **options),
                           optimizer_name=f"{workload.optimizer_name}; {words}")  # fmt: skip
    workload = replace(workload, model=model or workload.model, plan=constant if steady else workload.plan)
    if not held_out:
        return workload
    return HeldOut(**{name: getattr(workload, name) for name in workload.__dataclass_fields__})


@dataclass(frozen=True)
class WorkloadObjective(NamedObjective):
    """Trains a workload by a trial's parameters; the value is its accuracy, or loss, on held-out data.

    Attributes:
        workload: its spec, or module:factory; may have parameters in braces.
        workers: of a trial.
        epochs: of a trial; None for the workload's own.
        codec: where the space does not say.
        link: speed of emulated links.
        inherits: trials are stretches of training that go on from their parents' weights.
    """

    starts_ranks: ClassVar[bool] = True
    workload: str
    workers: int = 1
    epochs: int | None = None
    codec: str = "none"
    link: str | None = None
    inherits: bool = False

    @property
    def space(self) -> Space:
        return space_of(self.workload)

    def settings(self, space: Space) -> dict[str, Any]:
        self.check(space)
        return {"maximize": self.maximize(space), "parallel": 1}

    def suited(self, sampler: Sampler) -> Objective:
        """Trials that go on from others, or are evaluated without training, where the sampler's do."""
        if not sampler.inherits:
            return self
        return replace(self, inherits=True) if sampler.trains else EvolvedObjective(self.workload)

    def maximize(self, space: Space) -> bool:
        """Whether the workload is judged by something that grows; parameters in braces are those of any point."""
        point = space.draw(np.random.default_rng(0))
        return get(_filled(self.workload, point)).objective.higher_is_better

    def check(self, space: Space) -> None:
        """Refuse parameters that nothing reads.

        Raises:
            BadInput: the sentence names what is read.
        """
        texts = [self.workload, *(str(v) for p in space.parameters.values() for v in getattr(p, "values", ()))]
        for name in space.parameters:
            if name not in (*CHANGES, *FIELDS, *CONFIGURATION) and not any(f"{{{name}}}" in text for text in texts):
                known = ", ".join((*CHANGES, *FIELDS, *CONFIGURATION))
                raise BadInput(f"nothing reads the parameter '{name}': name one of {known}, or {{{name}}} in a value")

    def spec(self, params: Mapping[str, Any], seed: int, runs: Path, *, held_out: bool = True) -> RunSpec:
        """The run that trains with these parameters."""
        values = {name: _filled(value, params) for name, value in params.items()}
        own = {name: values[name] for name in FIELDS if name in values}
        named = "".join(f", {name}={value!r}" for name, value in own.items()) + ", steady=true" * self.inherits
        base = _filled(self.workload, params)
        plain = not named and not held_out
        workload = base if plain else f"laconic_lab.searches.training:changed({base!r}, held_out={held_out}{named})"
        changes = {name: values[name] for name in CHANGES if name in values}
        codec = with_mode(str(values.get("codec", self.codec)), str(values.get("consistency", "sync")))
        return RunSpec(
            workload, self.workers, [codec], [seed], str(values.get("algorithm", "auto")), self.link,
            changes=Changes(**{"epochs": self.epochs, **changes}), runs=runs,
        )  # fmt: skip

    def __call__(self, trial: Trial) -> float:
        spec = self.spec(trial.params, trial.seed, trial.folder / "trials")
        begin = trial.weights_file if self.inherits else None
        trained, kept = train(spec, trial, begin)
        trial.used(round(trained.steps * _batch(spec)))
        if self.inherits:
            before = None if begin is None else trial.weights()
            trial.keep({**(before or {}), **kept})
        return value_of(spec, trained.test_accuracy, trained.test_loss)


def train(spec: RunSpec, trial: Trial | None = None, begin: Path | None = None) -> tuple[TrialRecord, dict[str, Any]]:
    """Train as a run of its own, to the end or to where a search's rule stops it; what came of it, and its weights.

    Args:
        begin: a file of weights to begin with.

    Raises:
        RankFailed: a worker raised or died.
    """
    (name,), (seed,) = spec.configurations, spec.seeds
    scored: list[Scored] = []

    def report(score: Scored) -> bool:
        """Pass an evaluation on to the search; whether the training is to stop."""
        scored.append(score)
        per_epoch = max(1, run.steps // max(1, int(run.record.workload.epochs)))
        assert trial is not None
        return trial.report(value_of(spec, score.accuracy, score.loss), score.step // per_epoch)

    with Workers(spec.workers, spec.link, spec.hosts) as workers:
        run = Run.begin("train", spec, workers, [configuration(name, spec.workers, spec.algorithm)])
        first = run.trial(run.record.configurations[0], seed)
        told = replace(first, keeps=True, begin=None if begin is None else str(begin))
        trained = workers.run(told, None if trial is None else report).trial
    if trained is None:  # stopped by the rule: the last evaluation is all there is
        if not scored:
            raise RankFailed("it was stopped before its first evaluation")
        trained = _cut_off(run, scored[-1])
    run.record.trials, run.record.finished = [trained], True
    run.conclude()
    checkpoints = CheckpointFiles(run.folder / "checkpoints")
    weights: dict[str, Any] = checkpoints.read(checkpoints.steps()[-1])["model"]
    shutil.rmtree(checkpoints.folder)  # nobody resumes a trial that has ended
    return trained, weights


def _batch(spec: RunSpec) -> int:
    return int(spec.changes.batch or get(spec.workload).batch)


def value_of(spec: RunSpec, accuracy: float | None, loss: float | None) -> float:
    """What a training is judged by: accuracy, or the loss where the workload's metric follows from that."""
    value = accuracy if get(spec.workload).objective.metric == "accuracy" else loss
    if value is None:
        raise BadInput("the training was never evaluated")
    return value


def _cut_off(run: Run, last: Scored) -> TrialRecord:
    empty = failed_trial(run.record.configurations[0].name, run.record.seeds[0], 0, "")
    return replace(empty, failed=None, steps=last.step, test_loss=last.loss, test_accuracy=last.accuracy,
                   seconds_total=last.seconds)  # fmt: skip


def _filled(value: Any, params: Mapping[str, Any]) -> Any:
    """A text with the parameters that it names in braces."""
    if not isinstance(value, str) or "{" not in value:
        return value
    try:
        return value.format_map(dict(params))
    except (KeyError, IndexError, ValueError) as error:
        raise BadInput(f"'{value}' names a parameter in braces that is not there: {error}") from error


def space_of(workload: str) -> Space:
    """Hyper-parameters that every workload has, around its own: rate, batch and, where there is one, momentum.

    >>> sorted(space_of("digits-mlp").parameters)
    ['batch', 'learning_rate', 'momentum']
    """
    found = get(workload)
    batches = [max(1, found.batch // 2), found.batch, 2 * found.batch, 4 * found.batch]
    parameters: dict[str, Any] = {
        "learning_rate": Float(found.learning_rate / 30, found.learning_rate * 10, log=True),
        "batch": Choice(sorted(set(batches))),
    }
    if "momentum" in found.optimizer_name:
        parameters["momentum"] = Float(0.0, 0.99)
    return Space(parameters)


def named_objective(workload: str, options: Mapping[str, Any]) -> WorkloadObjective:
    """The objective that a workload's name stands for; found by the entry point group `laconic.objectives`.

    Raises:
        BadInput: an unknown option.
    """
    given = {"workers": options.get("workers", 1), **dict(options.get("options", {}))}
    try:
        return WorkloadObjective(workload, **given)
    except TypeError as error:
        raise BadInput(f"options of a workload's search are epochs, codec and link: {error}") from error
