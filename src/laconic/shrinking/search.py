"""The smallest file under a budget: a scan of every layer alone, then all of them together.

Callers: `laconic.shrink`. The scan prunes one weight at a time, without retraining, and notes how the error rises. A
tolerance then says how far every layer goes: as far as its error alone rises by no more. Retraining makes up for much
of it, so the tolerance is found by trying: the largest, by bisection, whose model is within the budget after
retraining. Bits are scanned on the pruned model, a layer at a time. Then all layers share values together; where the
tuned result is beyond the budget, every layer gets another bit, and after `MORE_BITS` of them gentler densities.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.shrinking import prune, retrain
from laconic.shrinking.file import UNLIMITED, Reader, write
from laconic.shrinking.parts import Part
from laconic.shrinking.plan import Plan
from laconic.shrinking.share import build, share
from laconic.shrinking.training import Evaluate, Train, TrainingSteps
from laconic.storage.memo import Memo, MemoForm

DENSITIES = (0.5, 0.3, 0.18, 0.1, 0.06, 0.035, 0.02, 0.012)
TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.08, 0.15, 0.25, 0.4, 0.6)
BITS = (2, 3, 4, 5, 6, 7, 8)
MORE_BITS = 2


@dataclass(frozen=True)
class Candidate:
    """A pruned, shared and tuned model: its file's parts, its plan, and its error."""

    parts: dict[str, Part]
    plan: Plan
    error: float


class Search:
    """Finds what a plan leaves open; see the module.

    Args:
        train: retrains, or None.
        evaluate: a model's error.
        limit: what it may be at most.
        folder: of what was computed, which is not computed again when the search is resumed; None forgets it then.
        progress: is given a line and the share that is done after every step, or None.
    """

    def __init__(self, train: Train | None, evaluate: Evaluate, limit: float, folder: Path | None,
                 progress: Callable[[str, float], None] | None) -> None:  # fmt: skip
        self._step = TrainingSteps(progress)
        self.train, self.evaluate, self.limit = self._step.reporting(train), evaluate, limit
        self._trainer, self._folder = train, folder

    def best(self, model: nn.Module, plan: Plan, dense_error: float) -> Candidate:
        """The smallest candidate within the limit; the one with the least error where there is none."""
        with tempfile.TemporaryDirectory() as own:  # for a model that was pruned and judged is needed again
            made_from = (model, plan, self.limit, self._trainer, self.evaluate)
            memory = Memo(self._folder or Path(own), *made_from, required=True)
            return self._best(model, plan, dense_error, memory)

    def _best(self, model: nn.Module, plan: Plan, dense_error: float, memory: Memo) -> Candidate:
        names = list(prune.weights(model))
        searched = plan.density is None and self.train is not None
        trainings = plan.rounds * (len(TOLERANCES).bit_length() if searched else 1) + 1 if self.train else 0
        self._step.total = trainings + len(names) * (searched + plan.searches_bits)
        plans = self._densities(model, plan, dense_error, memory) if searched else [plan]
        missed: list[Candidate] = []
        for each in plans:
            pruned = memory.recall(_name("pruned", each.density), partial(self._prune, model, each))
            for more in range(MORE_BITS + 1 if plan.searches_bits else 1):
                found = self._share(model, pruned, each, more, memory)
                if found.error <= self.limit:
                    return found
                missed.append(found)
        return min(missed, key=lambda each: each.error)

    def _densities(self, model: nn.Module, plan: Plan, dense_error: float, memory: Memo) -> list[Plan]:
        """Plans with densities by name: first the least within the limit when retrained, then gentler ones."""
        scan = {name: memory.recall(_name("scan", name), partial(self._scan, model, plan, name))
                for name in prune.weights(model)}  # fmt: skip
        _check_rises(dense_error, [errors[-1] for errors in scan.values()])
        plans = [replace(plan, density=_within(scan, dense_error, tolerance)) for tolerance in TOLERANCES]
        low, high = 0, len(plans) - 1
        while low <= high:
            middle = (low + high) // 2
            kept = memory.recall(_name("pruned", plans[middle].density), partial(self._prune, model, plans[middle]))
            if kept["error"] <= self.limit:
                low = middle + 1
            else:
                high = middle - 1
        return plans[max(high, 0) :: -1]

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
        self._step(f"scan of {name}: error {errors[0]:.4g} at {DENSITIES[0]:g} … {errors[-1]:.4g} at {DENSITIES[-1]:g}")
        return errors

    def _prune(self, model: nn.Module, plan: Plan) -> dict[str, Any]:
        """The state of the model, pruned and retrained, its masks and its error."""
        small = retrain.copy_of(model)
        masks = plan.prune(small, self.train)
        small.eval()
        error = self.evaluate(small)
        self._step.say(f"pruned to {_overall(masks):.2%}: error {error:.4g}, limit {self.limit:.4g}")
        return {"state": dict(small.state_dict()), "masks": masks, "error": error}

    def _share(self, model: nn.Module, pruned: Mapping[str, Any], plan: Plan, more: int, memory: Memo) -> Candidate:
        """A pruned model with shared and tuned values, `more` bits a weight beyond what each needs alone."""
        small = retrain.copy_of(model)
        small.load_state_dict(pruned["state"])
        masks: dict[str, Tensor] = pruned["masks"]
        if plan.searches_bits:
            bits = {name: min(BITS[-1], more + memory.recall(_name("bits", name, plan.density), partial(
                self._fewest, small, name, masks, plan))) for name in prune.weights(small)}  # fmt: skip
            plan = replace(plan, bits=bits)

        def compute() -> tuple[dict[str, Part], float]:
            parts = plan.share_values(small, masks, self.train)
            small.eval()
            return parts, self.evaluate(small)

        parts, error = memory.recall(_name("shared", plan.density, plan.bits), compute, CANDIDATE)
        self._step.say(f"shared: error {error:.4g}, limit {self.limit:.4g}")
        return Candidate(parts, plan, error)

    @torch.no_grad()
    def _fewest(self, model: nn.Module, name: str, masks: Mapping[str, Tensor], plan: Plan) -> int:
        """The fewest bits with which, of one weight alone and not tuned, the error is within the limit."""
        weight = prune.weights(model)[name]
        before, mask = weight.clone(), masks.get(name, torch.ones_like(weight, dtype=torch.bool))
        try:
            for bits in BITS:
                weight.copy_(share(before, build(plan.share, bits), mask, plan.bit_price).dense())
                if bits == BITS[-1] or self.evaluate(model) <= self.limit:
                    break
        finally:
            weight.copy_(before)
        self._step(f"{name}: {bits} bits")
        return bits


def model_of(model: nn.Module, parts: Mapping[str, Part]) -> nn.Module:
    """A copy of the model with the tensors of parts, for inference."""
    small = retrain.copy_of(model)
    retrain.load(small, parts)
    return small.eval()


def _check_rises(dense_error: float, pruned: list[float]) -> None:
    """Raise BadInput if the error falls clearly when layers lose almost all of their weights."""
    if pruned and dense_error > 0 and statistics.fmean(pruned) < 0.8 * dense_error:  # some errors are below zero
        fell = f"{dense_error:.4g} to {statistics.fmean(pruned):.4g}"
        raise BadInput(f"evaluate gives an error, which rises as weights go; it fell from {fell}: is it an accuracy?")


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


def _overall(masks: Mapping[str, Tensor]) -> float:
    """The share of weights that masks keep; 1 without masks."""
    total = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / total if total else 1.0


def _name(what: str, *of: object) -> str:
    return f"{what}-{hashlib.blake2b(repr(of).encode(), digest_size=6).hexdigest()}"


def _read_candidate(path: Path) -> tuple[str, tuple[dict[str, Part], float]]:
    reader = Reader(path, UNLIMITED)
    parts = {each: reader.part(each) for each in reader.entries}
    return str(reader.about["key"]), (parts, float(reader.about["error"]))


def _write_candidate(path: Path, key: str, found: tuple[dict[str, Part], float]) -> None:
    write(path, found[0], {"key": key, "error": found[1]})


# The parts of a file and their error, as a file that `laconic inspect` reads.
CANDIDATE = MemoForm(".lac", _read_candidate, _write_candidate)
