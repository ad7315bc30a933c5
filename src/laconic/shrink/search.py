"""How far each layer can go under a budget: a scan of every layer alone, then all of them together.

Callers: `laconic.shrink`. The scan prunes one weight at a time, without retraining, and notes how the error rises. A
tolerance then says how far every layer goes: as far as its error alone rises by no more. Retraining makes up for much
of it, so the tolerance is found by trying: the largest, by bisection, whose model is within the budget after
retraining. Bits are scanned on the pruned model. What was computed is kept in a folder, and is not computed again when
the search is resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import PayloadError
from laconic.shrink import prune
from laconic.shrink.plan import Plan
from laconic.shrink.share import build, share
from laconic.shrink.training import Evaluate, Train
from laconic.storage import tree

DENSITIES = (0.5, 0.3, 0.18, 0.1, 0.06, 0.035, 0.02, 0.012)
TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.08, 0.15, 0.25, 0.4, 0.6)
BITS = (2, 3, 4, 5, 6, 7, 8)


class Memory:
    """Results by name, in a folder; without one they are computed each time."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self._folder, self._key = folder, key

    def recall(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` returned when it was last asked for under this name, by a search for the same thing."""
        if self._folder is None:
            return compute()
        path = self._folder / f"{name}.state"
        try:
            kept = tree.read_file(path)
            if kept["key"] == self._key:
                return kept["value"]
        except (PayloadError, KeyError, TypeError):
            pass  # missing, cut off or another's: computed anew
        value = compute()
        tree.write_file(path, {"key": self._key, "value": value})
        return value


class Search:
    """Finds what a plan leaves open; see the module.

    Args:
        train: retrains, or None.
        evaluate: a model's error.
        budget: how much it may rise.
        folder: of what was computed, or None.
        progress: is given a line after every step, or None.
    """

    def __init__(self, train: Train | None, evaluate: Evaluate, budget: float, folder: Path | None,
                 progress: Callable[[str], None] | None) -> None:  # fmt: skip
        self.train, self.evaluate, self.budget = train, evaluate, budget
        self._folder, self._say = folder, progress or (lambda line: None)

    def complete(self, model: nn.Module, plan: Plan) -> Plan:
        """The plan with densities and bits."""
        memory = Memory(self._folder, _digest(model, plan, self.budget))
        limit = self.evaluate(model) + self.budget
        small = deepcopy(model)
        if plan.density is None:
            plan = replace(plan, density=self._densities(model, plan, limit, memory) if self.train else 1.0)
        if plan.bits is None and plan.share != "none":
            masks = plan.prune(small, self.train)
            plan = replace(plan, bits=self._bits(small, masks, plan, limit, memory))
        return plan

    def _densities(self, model: nn.Module, plan: Plan, limit: float, memory: Memory) -> prune.Density:
        """The least densities by name whose model, retrained, is within the limit; the gentlest where none is."""
        names = list(prune.weights(model))
        scan = {name: memory.recall(f"scan-{_slug(name)}", partial(self._scan, model, plan, name)) for name in names}
        dense = limit - self.budget
        low, high = 0, len(TOLERANCES) - 1
        best = _within(scan, dense, TOLERANCES[0])
        while low <= high:
            middle = (low + high) // 2
            density = _within(scan, dense, TOLERANCES[middle])
            error = memory.recall(f"joint-{middle}", partial(self._try, model, plan, density))
            self._say(f"tolerance {TOLERANCES[middle]:g}: error {error:.4g}, limit {limit:.4g}")
            if error <= limit:
                best, low = density, middle + 1
            else:
                high = middle - 1
        return best

    @torch.no_grad()
    def _scan(self, model: nn.Module, plan: Plan, name: str) -> list[float]:
        """The error with one weight pruned to each density, not retrained; the model is left as it was."""
        weight, errors = prune.weights(model)[name], []
        before = weight.clone()
        try:
            for density in DENSITIES:
                mask = prune.magnitude({name: before}, density, scope="layer", structured=plan.structured)[name]
                weight.copy_(before * mask)
                errors.append(self.evaluate(model))
        finally:
            weight.copy_(before)
        self._say(f"scan of {name}: error {errors[0]:.4g} at {DENSITIES[0]:g} … {errors[-1]:.4g} at {DENSITIES[-1]:g}")
        return errors

    def _try(self, model: nn.Module, plan: Plan, density: Mapping[str, float]) -> float:
        small = deepcopy(model)
        replace(plan, density=density).prune(small, self.train)
        return self.evaluate(small)

    def _bits(
        self, model: nn.Module, masks: Mapping[str, Tensor], plan: Plan, limit: float, memory: Memory
    ) -> dict[str, int]:
        """For each weight the fewest bits with which, alone and not tuned, the error stays within the limit."""
        found = {}
        for name, weight in prune.weights(model).items():
            mask = masks.get(name, torch.ones_like(weight, dtype=torch.bool))
            fewest = partial(self._fewest, model, weight, mask, plan.share, limit)
            found[name] = int(memory.recall(f"bits-{_slug(name)}", fewest))
            self._say(f"{name}: {found[name]} bits")
        return found

    @torch.no_grad()
    def _fewest(self, model: nn.Module, weight: Tensor, mask: Tensor, method: str, limit: float) -> int:
        """The fewest bits of one weight; the model is left as it was."""
        before = weight.clone()
        try:
            for bits in BITS[:-1]:
                weight.copy_(share(before, build(method, bits), mask).dense())
                if self.evaluate(model) <= limit:
                    return bits
            return BITS[-1]
        finally:
            weight.copy_(before)


def _within(scan: Mapping[str, list[float]], dense: float, tolerance: float) -> dict[str, float]:
    """For each weight the least density up to which its error alone has not risen by more than the tolerance."""
    chosen = {}
    for name, errors in scan.items():
        chosen[name] = 1.0
        for density, error in zip(DENSITIES, errors, strict=True):
            if error > dense + tolerance:
                break
            chosen[name] = density
    return chosen


def _slug(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def _digest(model: nn.Module, plan: Plan, budget: float) -> str:
    """What a search is for: the weights, the plan and the budget."""
    found = hashlib.blake2b(f"{plan} {budget}".encode(), digest_size=16)
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
