"""Every robust rule under every attack by f = 0…3 of 11 workers, on digits: the accuracy that is left.

    python -m benchmarks byzantine                      # about 200 s of one core
    python -m benchmarks byzantine --rules krum,median --attacks alie --seeds 0 --table

The 11 workers are simulated in one process: at every step each honest one computes a real gradient on its own 12 rows
of the batch; the liars send what the attack makes of all honest ones' (they know them, and the rule); the rule is the
function that `distribute(consistency="robust(…)")` applies on every worker, and gets 11 float32 vectors. The rule is
told the true f. Bulyan needs 4f + 3 workers: with 11 it stands f = 2 at most, and that cell is empty.

Model: 64-48-10, SGD with momentum 0.9 at a rate of 0.1, 20 epochs of the bundled digits; accuracy on the test rows,
mean over seeds. Anything that is not finite in a combined gradient or a weight is counted, at every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from laconic.consistency.robust.rules import RULES, Array, aggregate
from laconic.workloads.data import load
from laconic_lab.environment import environment

WORKERS, SHARE, EPOCHS, FAULTS = 11, 12, 20, (0, 1, 2, 3)
OUTPUT = Path(__file__).parents[1] / "results" / "byzantine.json"
Attack = Callable[[Array, int, np.random.Generator], Array]  # honest rows, f, chance -> f rows


def _nan(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """An honest gradient with NaN in one coordinate."""
    lies = honest[:f].copy()
    lies[:, chance.integers(honest.shape[1])] = np.nan
    return lies


def _infinity(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """Plus or minus infinity everywhere, from one step to the next."""
    return np.full((f, honest.shape[1]), chance.choice([-np.inf, np.inf]), dtype=np.float32)


def _huge(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """±1e38 in every coordinate: finite, and its square is not."""
    return (1e38 * chance.choice([-1.0, 1.0], (f, honest.shape[1]))).astype(np.float32)


def _noise(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """Normal noise, 100 times as long as an honest gradient."""
    size = 100 * np.linalg.norm(honest, axis=1).mean() / np.sqrt(honest.shape[1])
    return (size * chance.standard_normal((f, honest.shape[1]))).astype(np.float32)


def _sign_flip(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """The mean of the honest, reversed."""
    return np.tile(-honest.mean(axis=0), (f, 1))


def _reversed_tenfold(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """The mean of the honest, reversed and ten times as long."""
    return np.tile(-10 * honest.mean(axis=0), (f, 1))


def _alie(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """A Little Is Enough: z standard deviations off the mean in every coordinate, z so that it hides among the honest.

    With n workers s = ⌊n/2⌋ + 1 − f honest ones must be farther out: z = Φ⁻¹((n − f − s)/(n − f)).
    Source: Baruch et al., A Little Is Enough, NeurIPS 2019, Alg. 3.
    """
    n = len(honest) + f
    z = norm.ppf((n - f - (n // 2 + 1 - f)) / (n - f))
    return np.tile((honest.mean(axis=0) - z * honest.std(axis=0)).astype(np.float32), (f, 1))


def _alie_farther(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """The same with z = 1.5, more than few liars among 11 may ask for by the formula, which says 0, 0.14 and 0.32."""
    return np.tile((honest.mean(axis=0) - 1.5 * honest.std(axis=0)).astype(np.float32), (f, 1))


def _inner_product(honest: Array, f: int, chance: np.random.Generator) -> Array:
    """Half the mean of the honest, reversed. Source: Xie et al., Fall of Empires, UAI 2019, ε = 0.5."""
    return np.tile(-0.5 * honest.mean(axis=0), (f, 1))


ATTACKS: dict[str, Attack] = {
    "nan": _nan, "inf": _infinity, "1e38": _huge, "noise": _noise, "sign flip": _sign_flip,
    "−10×": _reversed_tenfold, "alie": _alie, "alie 1.5": _alie_farther, "ipm": _inner_product,
}  # fmt: skip


class Simulation:
    """One model, the gradients of all honest workers at a step, and the optimiser that takes the rule's."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        data = load("digits")
        self.x, self.test_x = (s.x.reshape(len(s), -1).float() / 16 for s in (data.train, data.test))
        self.y, self.test_y = data.train.y, data.test.y
        self.model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.parameters = list(self.model.parameters())

    def gradients(self, rows: Tensor, honest: int) -> Array:
        """One gradient a row, of each honest worker's own share of the batch."""
        shares = rows[: honest * SHARE].view(honest, SHARE)
        weights = {name: p.detach() for name, p in self.model.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(functional_call(self.model, weights, (x,)), y)

        parts = vmap(grad(loss), in_dims=(None, 0, 0))(weights, self.x[shares], self.y[shares])
        return torch.cat([part.reshape(honest, -1) for part in parts.values()], dim=1).numpy()

    def step(self, gradient: Array) -> None:
        pieces = torch.split(torch.from_numpy(gradient), [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape)
        self.optimizer.step()

    def accuracy(self) -> float:
        with torch.no_grad():
            return 100 * float((self.model(self.test_x).argmax(1) == self.test_y).float().mean())


def run(rule: str, attack: str | None, f: int, seed: int) -> dict[str, Any]:
    """Train once; what came of it."""
    begun = time.perf_counter()
    simulation, chance = Simulation(seed), np.random.default_rng(seed)
    order, not_finite = torch.Generator().manual_seed(seed), 0
    for _ in range(EPOCHS):
        batches = torch.randperm(len(simulation.x), generator=order).split(WORKERS * SHARE)
        for rows in batches[:-1]:
            honest = simulation.gradients(rows, WORKERS - f)
            with np.errstate(all="ignore"):
                lies = ATTACKS[attack](honest, f, chance) if attack is not None and f else honest[:0]
            combined = aggregate(rule, np.concatenate([honest, lies]), f)
            not_finite += int((~np.isfinite(combined)).sum())
            simulation.step(combined)
            not_finite += int(sum((~torch.isfinite(p)).sum() for p in simulation.parameters))
    return {
        "rule": rule, "attack": attack, "f": f, "seed": seed, "accuracy": simulation.accuracy(),
        "not_finite": not_finite, "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> str:
    """Accuracy by rule and f (rows) and attack (columns), as Markdown; without a liar the attack does not matter."""
    attacks = [name for name in ATTACKS if any(each["attack"] == name for each in runs)]
    lines = ["| rule | f | " + " | ".join(attacks) + " |", "|---|---|" + "---|" * len(attacks)]
    for rule in dict.fromkeys(each["rule"] for each in runs):
        for f in FAULTS:
            cells = []
            for attack in attacks:
                here = [r for r in runs if r["rule"] == rule and r["f"] == f and (not f or r["attack"] == attack)]
                cells.append(f"{statistics.mean(r['accuracy'] for r in here):.1f}" if here else "–")
            if set(cells) != {"–"}:
                lines.append(f"| {rule} | {f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", action="store_true", help="print the table and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun, runs = time.perf_counter(), []
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for rule in arguments.rules.split(","):
        cells = [(None, 0)] + [(a, f) for f in FAULTS[1:] for a in arguments.attacks.split(",")]
        for attack, f in cells:
            if f <= RULES[rule].most(WORKERS):
                runs += [run(rule, attack, f, seed) for seed in seeds]
        print(f"{rule}: {time.perf_counter() - begun:.0f} s so far", file=sys.stderr)
    print(table(runs))
    broken = [each for each in runs if each["not_finite"]]
    print(f"{len(runs)} runs, {len(broken)} with anything that is not finite")
    if not arguments.table:
        settings = {"workers": WORKERS, "rows_per_worker": SHARE, "epochs": EPOCHS, "seeds": seeds, "simulated": True}
        spent = {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time()}
        text = {"settings": settings, "environment": environment(), **spent, "runs": runs}
        arguments.output.write_text(json.dumps(text, indent=1) + "\n")
