"""Does top-k keep the assumption that its proof of convergence needs? The ratio of Assumption 1, step by step.

    export LACONIC_DATA=…
    python -m benchmarks topk-assumption --workload rcv1-logistic
    python -m benchmarks topk-assumption --workload linear --steps 600
    python -m benchmarks topk-assumption --workload 'cifar-resnet(110)' --batch 32 --steps 25

P workers train by plain SGD with top-k and error feedback, as in Alistarh et al., "The Convergence of Sparsified
Gradient Methods", NeurIPS 2018, Algorithm 1. With a_p = α·G_p(v) + ε_p of worker p, one step is

    v ← v − 1/P · Σ TopK(a_p),   ε_p ← a_p − TopK(a_p),

and Assumption 1 says that for a small constant ξ, in every step,

    ‖TopK(1/P · Σ a_p) − 1/P · Σ TopK(a_p)‖ ≤ ξ·‖α·G(v)‖,   G = 1/P · Σ G_p.

Recorded are the left side over ‖α·G(v)‖ and the loss of the batch, for K = 0.1, 1 and 10 % of all weights and for dense
SGD. The workers take turns in one process; the arithmetic is that of P processes. Differs from the paper: α follows the
workload's own plan, and the momentum and weight decay of its optimiser are left out, since the algorithm has none.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laconic.codecs import codec
from laconic.workloads import Changes
from laconic.workloads.workload import Task
from laconic_lab.environment import environment

OUTPUT = Path(__file__).parents[1] / "results" / "topk-assumption.json"
SHARES = (0.001, 0.01, 0.1, 1.0)  # of the weights; 1.0 is dense SGD


def top_k(x: Tensor, share: float) -> Tensor:
    """The vector with all but its largest elements set to zero, as the codec chooses them."""
    if share >= 1:
        return x.clone()
    chosen = codec(f"topk({share})")
    return chosen.decode(chosen.encode(x), x.numel())


def ratio(accumulated: Tensor, step: Tensor, share: float) -> tuple[float, Tensor]:
    """The ratio of Assumption 1, and the rows' TopK.

    Args:
        accumulated: a_p, one row a worker.
        step: α·G(v), the mean of the workers' gradients times the learning rate.
    """
    rows = torch.stack([top_k(row, share) for row in accumulated])
    difference = top_k(accumulated.mean(0), share) - rows.mean(0)
    return float(difference.norm() / step.norm()), rows


def gradients(task: Task, number: int, workers: int, optimizer: torch.optim.Optimizer) -> tuple[Tensor, float]:
    """α·G_p of every worker in the `number`-th step, a row each, and the loss of the batch."""
    (epoch, step), found, loss = divmod(number, task.steps_per_epoch(workers)), [], 0.0
    for worker in range(workers):
        task.begin_step(optimizer, epoch, step, worker, workers)
        optimizer.zero_grad()
        part = task.loss(task.model, task.batch(epoch, step, worker, workers))
        part.backward()
        loss += float(part.detach()) / workers
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in task.model.parameters()]
        found.append(optimizer.param_groups[0]["lr"] * parameters_to_vector(flat))
    return torch.stack(found), loss


def train(name: str, share: float, workers: int, steps: int | None, changes: Changes) -> dict[str, Any]:
    """One training with K = `share` of the weights, of so many steps or all of the workload's; what each step gave."""
    task = changes.of(name).prepare(0)
    whole = task.workload.epochs * task.steps_per_epoch(workers)
    steps = min(steps or whole, whole)  # beyond them the plan has no learning rate
    model: nn.Module = task.model
    optimizer = torch.optim.SGD(model.parameters(), 1.0)  # holds the learning rate of the plan
    weights = parameters_to_vector(model.parameters()).detach().clone()
    residuals = torch.zeros(workers, weights.numel())
    ratios, losses, begun = [], [], time.perf_counter()
    for number in range(steps):
        scaled, loss = gradients(task, number, workers, optimizer)
        accumulated = scaled + residuals
        found, rows = ratio(accumulated, scaled.mean(0), share)
        residuals = accumulated - rows
        weights -= rows.mean(0)
        vector_to_parameters(weights, model.parameters())
        ratios.append(float(f"{found:.4g}"))
        losses.append(float(f"{loss:.4g}"))
    return {
        "workload": name, "share": share, "workers": workers, "steps": steps, "numel": weights.numel(),
        "batch": task.global_batch(workers), "seconds": round(time.perf_counter() - begun, 1),
        "learning_rate": task.workload.learning_rate, "ratio": ratios, "loss": losses,
    }  # fmt: skip


def summary(run: dict[str, Any]) -> str:
    """A row of the table in the docs."""
    ordered = sorted(run["ratio"])
    middle, most = ordered[len(ordered) // 2], ordered[-1]
    tail = run["loss"][-max(1, len(run["loss"]) // 10) :]
    k = "dense" if run["share"] >= 1 else f"{100 * run['share']:g} %"
    loss = sum(tail) / len(tail)
    return f"| `{run['workload']}` | {k} | {run['steps']:,} | {middle:.3g} | {most:.3g} | {loss:.4g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, help="at most; default: the workload's")
    parser.add_argument("--learning-rate", type=float, help="at the start; default: the workload's")
    parser.add_argument("--batch", type=int, help="samples of a step, of all workers; default: the workload's")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = Changes(learning_rate=options.learning_rate, batch=options.batch)
    kept = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    runs = [run for run in kept if run["workload"] != options.workload]
    print("| workload | K | steps | median ratio | largest | loss at the end |\n|---|---|---|---|---|---|")
    for share in SHARES:
        runs.append(train(options.workload, share, options.workers, options.steps, changes))
        print(summary(runs[-1]), flush=True)
    content = {"environment": environment(), "runs": runs}
    options.output.write_text(json.dumps(content, indent=None, separators=(",", ":")) + "\n")
