"""Training without gradients: a trial's weights are its parent's with noise, and are only evaluated.

Callers: `laconic search WORKLOAD --method gradient_free`. The value is the loss over the training samples, since
selection by it is the training; neither held-out nor test data is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from laconic.errors import BadInput
from laconic.searching.parameters import Float
from laconic.searching.space import Space
from laconic.searching.trial import NamedObjective, Trial
from laconic.workloads import get
from laconic.workloads.workload import Task
from laconic_lab.runs.trainer import begin_with

NOISE = Space({"noise": Float(0.003, 0.3, log=True)})


@dataclass(frozen=True)
class EvolvedObjective(NamedObjective):
    """The loss of a workload's network after noise was added to its parent's weights; lower is better.

    Attributes:
        workload: its spec.
    """

    workload: str

    @property
    def space(self) -> Space:
        return NOISE

    def settings(self, space: Space) -> dict[str, Any]:
        if list(space.parameters) != ["noise"] or not isinstance(space.parameters["noise"], Float):
            raise BadInput("without gradients there is one parameter, the noise: --space 'noise = log(0.003, 0.3)'")
        return {"maximize": False}

    @torch.no_grad()
    def __call__(self, trial: Trial) -> float:
        task = _task(self.workload)
        model, before = task.workload.build(trial.seed), trial.weights()
        if before is not None:
            begin_with(model, before)
            chance = torch.Generator().manual_seed(trial.seed)
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=chance), alpha=trial.params["noise"])
        loss = task.evaluate(model, "train")["loss"]
        trial.used(len(task.data.train))
        trial.keep(model.state_dict())
        return loss


@lru_cache(maxsize=1)
def _task(workload: str) -> Task:
    """Read once in each process."""
    return get(workload).prepare(0)
