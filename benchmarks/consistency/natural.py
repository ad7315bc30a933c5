"""Does natural gradient earn its place: `natural(8)` beside `local(8)` on digits, at equal samples.

    python -m benchmarks natural

Four processes share batches of 64; a 64-64-64-10 network, plain SGD at four learning rates, 10 epochs, two seeds. Test
accuracy after 5 and 10 epochs, of the mean of the workers' weights, and the processor time of one worker.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from laconic.transports.launcher import run_local
from laconic.workloads.data import load
from laconic_lab.environment import environment

MODES = ("local(8)", "natural(8)")
RATES = (0.1, 0.2, 0.4, 0.8)
BATCH = 64


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load("digits")
    train, test = (part.x.reshape(len(part), -1).float() / 16 for part in (data.train, data.test))
    return train, data.train.y, test, data.test.y


def train(mode: str, rate: float, seed: int, epochs: int) -> dict[str, Any]:
    """One training on this rank."""
    x, y, test_x, test_y = digits()
    found: dict[str, Any] = {"mode": mode, "rate": rate, "seed": seed, "accuracy": []}
    with laconic.init(timeout_s=60) as world:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), rate)
        job = laconic.distribute(model, optimizer, consistency=mode)
        begun = time.process_time()
        for epoch in range(epochs):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            for rows in order.split(BATCH)[:-1]:
                mine = rows[world.rank :: world.world_size]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
                optimizer.step()
            if epoch + 1 in (epochs // 2, epochs):
                flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
                mean = laconic.all_reduce(flat, "mean", algorithm="ring")
                found["accuracy"].append(accuracy(model, mean, test_x, test_y))
        found["processor_s"] = time.process_time() - begun
        job.close()
    return found


def accuracy(model: nn.Module, weights: Tensor, x: Tensor, y: Tensor) -> float:
    """Test accuracy in percent of the network with these weights; the model itself is left alone."""
    parts = torch.split(weights, [p.numel() for p in model.parameters()])
    named = {name: part.view_as(p) for (name, p), part in zip(model.named_parameters(), parts, strict=True)}
    with torch.no_grad():
        return 100 * float((torch.func.functional_call(model, named, (x,)).argmax(1) == y).float().mean())


def run_rank(seeds: list[int], epochs: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [train(mode, rate, seed, epochs) for rate in RATES for seed in seeds for mode in MODES]


def table(runs: list[dict[str, Any]]) -> str:
    head = " | ".join(f"`{mode}` half-way, at the end" for mode in MODES)
    lines = [f"| learning rate | {head} |", "|---|---|---|"]
    for rate in RATES:
        cells = []
        for mode in MODES:
            found = [run["accuracy"] for run in runs if (run["mode"], run["rate"]) == (mode, rate)]
            cells.append(", ".join(f"{sum(column) / len(column):.1f}" for column in zip(*found, strict=True)))
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    for mode in MODES:
        spent = sorted(run["processor_s"] for run in runs if run["mode"] == mode)
        lines.append(f"{mode}: {spent[len(spent) // 2]:.1f} s of processor time a training (median)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "natural.json")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = run_local(4, run_rank, (seeds, options.epochs), timeout_s=900)[0]
    content = {"epochs": options.epochs, "environment": environment(), "runs": runs}
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(table(runs))
