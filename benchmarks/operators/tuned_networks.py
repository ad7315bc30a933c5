"""Whole networks tuned, beside torch: a forward pass, a training step, and recurrent layers that keep little.

python -m benchmarks tuned-networks forward vgg16 1      tune and time a network for so many samples, one thread
python -m benchmarks tuned-networks train alexnet 16     forward and backward, weights that change every step
python -m benchmarks tuned-networks train alexnet 16 undivided      the same without micro-batches
python -m benchmarks tuned-networks noise vgg16 2        how far torch's own gradients are from those in float64
python -m benchmarks tuned-networks recurrent            1000 steps of an LSTM with 5 % of its activations, in JSON too

Prints JSON. Layers by themselves: `python -m benchmarks operators`.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

import laconic
from laconic.operators import LSTM, plan_of
from laconic.operators.bptt import costs
from laconic.operators.cells import CELLS
from laconic.operators.model_error import gradient_noise
from laconic.operators.recurrent import BLOCK, budget_for
from laconic.operators.timing import race
from laconic.workloads import models
from laconic_lab.environment import environment

TURNS, BUDGET_S = 21, 40.0


def _tuned(model: nn.Module, x: torch.Tensor, train: bool, policy: str, cache: str) -> tuple[nn.Module, list[float]]:
    """The model tuned, with the seconds of each minute's work that it took to reach every layer."""
    seconds: list[float] = []
    while not seconds or any("the time was up" in row.left_alone for row in plan_of(model).rows):
        start = time.perf_counter()
        model = laconic.tune(model, x, train=train, policy=policy, cache=cache)
        seconds.append(time.perf_counter() - start)
    return model, seconds


def network(name: str, batch: int, train: bool, policy: str = "powers") -> dict[str, Any]:
    """A network as torch computes it and as it is tuned, in turns."""
    torch.manual_seed(0)
    native = models.build(name).eval()
    x = torch.randn(batch, *models.describe(name.partition("(")[0]).sample)
    with tempfile.TemporaryDirectory() as cache:
        tuned, seconds = _tuned(copy.deepcopy(native), x, train, policy, cache)
        again = copy.deepcopy(native)
        start = time.perf_counter()
        laconic.tune(again, x, train=train, policy=policy, cache=cache)
        loading_s = time.perf_counter() - start

    def step(model: nn.Module) -> None:
        if train:
            model.zero_grad()
            model(x).square().mean().backward()
        else:
            with torch.no_grad():
                model(x)

    times = race({"native": lambda: step(native), "tuned": lambda: step(tuned)}, TURNS, BUDGET_S, float("inf"))
    return {
        "network": name,
        "batch": batch,
        "train": train,
        "policy": policy,
        "tuning_s": seconds,
        "loading_s": loading_s,
        "micro_batching": plan_of(tuned).micro_batching,
        "native_ms": 1e3 * times["native"].seconds,
        "tuned_ms": 1e3 * times["tuned"].seconds,
        "speedup": times["tuned"].speedup,
        "turns": times["tuned"].turns,
        "error": plan_of(tuned).error,
        "plan": str(plan_of(tuned)).splitlines(),
    }


def recurrent(steps: int = 1000, batch: int = 16, width: int = 128) -> dict[str, Any]:
    """An LSTM's forward and backward pass: torch's, ours keeping all, ours keeping 5 %."""
    torch.manual_seed(0)
    x = torch.randn(steps, batch, width)
    ours = LSTM(width, width)
    theirs = nn.LSTM(width, width)
    theirs.load_state_dict(ours.state_dict())
    little = LSTM(width, width, memory=0.05)
    little.load_state_dict(ours.state_dict())
    layers = {"keeps all": ours, "torch": theirs, "keeps 5 %": little}
    times = race({name: (lambda m=m: m(x)[0].square().mean().backward()) for name, m in layers.items()}, 9, BUDGET_S,
                 float("inf"))  # fmt: skip
    grads = []
    for layer in (ours, little):
        layer.zero_grad()
        layer(x)[0].square().mean().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    budget = budget_for(CELLS["LSTM"], -(-steps // BLOCK), 0.05)
    return {
        "steps": steps,
        "milliseconds": {name: 1e3 * found.seconds for name, found in times.items()},
        "time_over_keeping_all": 1 / times["keeps 5 %"].speedup,
        "time_over_torch": times["torch"].speedup and times["torch"].speedup / times["keeps 5 %"].speedup,
        "recomputed": float(costs(budget)[0][budget.blocks, 0]) / budget.blocks - 1,  # 1.0 is one more forward pass
        "memory_share": budget.total / (budget.inside * budget.blocks),
        "same_bits": all(torch.equal(a, b) for a, b in zip(*grads, strict=True)),
    }


def noise(name: str, batch: int) -> dict[str, Any]:
    """How far torch's own gradients of a network are from those in float64."""
    torch.manual_seed(0)
    model, shape = models.build(name).eval(), models.describe(name.partition("(")[0]).sample
    return {"network": name, "batch": batch, "gradient_noise": gradient_noise(model, (torch.randn(batch, *shape),))}


def main() -> None:
    torch.set_num_threads(1)
    what, *words = sys.argv[1:]
    if what == "recurrent":
        found = recurrent()
    elif what == "noise":
        found = noise(words[0], int(words[1]))
    else:
        found = network(words[0], int(words[1]), what == "train", *words[2:])
    print(json.dumps({"environment": environment(), **found}, indent=1, ensure_ascii=False))
