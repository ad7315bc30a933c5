"""The peak memory of training a model, measured in a process of its own: `python -m … MODEL BATCH` prints JSON.

Callers: `bench/planner.py`. What counts is how far the resident memory rises above what it was before the model was
there; a small step before that brings in torch's own kernels.
"""

from __future__ import annotations

import gc
import json
import sys

import torch

from laconic.planner.cost import sum_of_outputs
from laconic.planner.subject import Subject, subject
from laconic_lab.bench.resident import begin_peak, peak_nbytes

STEPS = 3


def _train(chosen: Subject, batch: int, steps: int) -> None:
    built = chosen.model("cpu").train()
    x, rule = chosen.inputs(batch, "cpu"), chosen.optimizer(built.parameters())
    for _ in range(steps):
        rule.zero_grad()
        sum_of_outputs(built(x)).backward()  # type: ignore[no-untyped-call]
        rule.step()


def measure(model: str, batch: int) -> int:
    """Bytes above the start, at the peak of a few steps."""
    torch.set_num_threads(1)
    chosen = subject(model)
    _train(chosen, 2, 1)
    gc.collect()
    before = begin_peak()
    _train(chosen, batch, STEPS)
    return peak_nbytes() - before


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"peak_nbytes": measure(sys.argv[1], int(sys.argv[2]))}))
