"""Strategies whose workers share one model: its layers divided, or its stages one after the other.

Caller: `strategies.py`. `module` is a whole copy on every worker, made when it is tested, kept or compared; what trains
is `model`, this worker's part.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.exchange.collectives import all_gather, barrier, broadcast
from laconic.parallel import Boundary, Data, Plan, Stages, Traffic
from laconic.parallel.boundary import pack, unpack
from laconic.parallel.divide import CONTEXT, divide
from laconic.parallel.pipeline import Pipeline
from laconic.parallel.state import load_whole, whole_state
from laconic.transports.world import World
from laconic.workloads.workload import Batch, Task
from laconic_lab.records.record import Configuration, LayerRecord, TimeSpan
from laconic_lab.runs.trainee import Parts, Times, Trainee

WAYS = ("forward", "backward")
Counts = dict[tuple[str, str], int]  # by boundary and way


def divided_trainee(chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> Trainee:
    """The strategy of a division: layers, or stages."""
    codecs = chosen.codec.split(" → ")  # as a boundary writes itself
    plan, boundary = Plan.of(chosen.options["division"]), Boundary.of((codecs[0], codecs[-1]))
    if isinstance(plan.alone, Stages):
        return PipelineTrainee(chosen, module, optimizer, world, plan.alone, boundary)
    return DivideTrainee(chosen, module, optimizer, world, plan, boundary)


class DividedTrainee(Trainee):
    """Base of layers and stages: counts bytes by boundary."""

    _traffic: Traffic

    def __init__(
        self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World, boundary: Boundary
    ) -> None:
        super().__init__(chosen, module, optimizer, world)
        self._boundary, self._steps, self._before = boundary, 0, (0, 0.0)

    def parts(self, times: Times) -> Parts:
        now = (self._traffic.total_nbytes, sum(self._traffic.wait_s.values()))
        (sent, wait), self._before = (now[0] - self._before[0], now[1] - self._before[1]), now
        self._steps += 1
        return Parts(times.ended - times.begun - wait, wait=wait, sent=float(sent))

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        """Nothing is sent by parameter: `layers` is by boundary."""
        return "none", 0.0

    def layers(self, sent: float | None) -> list[LayerRecord]:
        return self._rows(self._traffic.sent_nbytes, self._traffic.numel)

    def _rows(self, sent: Mapping[tuple[str, str], int], numel: Mapping[tuple[str, str], int]) -> list[LayerRecord]:
        """What crossed each boundary, in the mean of the steps so far."""
        rows = []
        for (name, way), nbytes in sent.items():
            count, steps = numel[name, way], max(1, self._steps)
            codec = self._boundary.forward if way == "forward" else self._boundary.backward
            label = "none" if nbytes >= 4 * count else str(codec)
            rows.append(
                LayerRecord(f"{name}, {way}", [], round(count / steps), label, 4 * count / steps, nbytes / steps)
            )
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"packed": dict(self._traffic.packed)}

    def _load_packed(self, state: dict[str, Any]) -> None:
        """Restore the counters that seed random codecs."""
        self._traffic.packed.clear()
        self._traffic.packed.update(state["packed"])


class DivideTrainee(DividedTrainee):
    """Layers divided over all workers, each with rows of its own."""

    def __init__(
        self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World, plan: Plan,
        boundary: Boundary,
    ) -> None:  # fmt: skip
        super().__init__(chosen, module, optimizer, world, boundary)
        if not any(isinstance(form, Data) for _, form in plan.entries):
            plan = Plan((*plan.entries, ("", Data(ask=True))))
        own = vars(module).pop("forward", None)  # of the warm-up, whose model has no data
        self.model = copy.deepcopy(module)
        if own is not None:
            module.forward, self.model.forward = own, partial(own.func, self.model)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        divide(self.model, plan, codec=boundary, world=world)
        parts = dict(self.model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [parts[names[id(parameter)]] for parameter in group["params"]]
        self._traffic = getattr(self.model, CONTEXT).traffic

    def settle(self) -> None:
        self.module.load_state_dict(whole_state(self.model))

    finish = settle

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_whole(self.model, self.module.state_dict())
        self._load_packed(state)


class PipelineTrainee(DividedTrainee):
    """Stages, one a worker; all are given the whole batch. Micro-batches may differ by a sample, as batches do."""

    model: Pipeline

    def __init__(
        self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World, stages: Stages,
        boundary: Boundary,
    ) -> None:  # fmt: skip
        super().__init__(chosen, module, optimizer, world, boundary)
        for codec in (boundary.forward, boundary.backward):  # kernels are compiled before the clock starts
            unpack(codec, pack(codec, torch.randn(64)), (64,), torch.float32)
        whole = copy.deepcopy(module)
        twins = {id(own): twin for own, twin in zip(module.parameters(), whole.parameters(), strict=True)}
        made = divide(whole, replace(stages, uneven=True), codec=boundary, world=world)
        assert isinstance(made, Pipeline)
        self.model, self._world, self._traffic = made, world, made.traffic
        held = {id(parameter) for parameter in made.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [twins[id(p)] for p in group["params"] if id(twins[id(p)]) in held]
        self._seen: list[TimeSpan] = []
        self._sums: tuple[Counts, Counts] = ({}, {})

    def part(self, share: int, workers: int) -> tuple[int, int]:
        return 0, 1

    def train_on(self, task: Task, batch: Batch) -> tuple[float, float]:
        losses = task.workload.objective.losses
        found = self.model.step(batch.x, batch.y, lambda output, target: losses(output, target).mean())
        ended, loss = time.perf_counter(), torch.zeros(1) if found is None else found.reshape(1)
        broadcast(loss, root=self.chosen.workers - 1, group=self._world)
        return ended, float(loss)

    def settle(self) -> None:
        for _ in self.model.drain():
            self.optimizer.step()
            self.optimizer.zero_grad()
        whole = self.model.whole_state_dict()
        if whole is not None:
            self.module.load_state_dict(whole)
        for tensor in self.module.state_dict().values():
            broadcast(tensor, group=self._world)

    def finish(self) -> None:
        self._seen, self._sums = _on_one_clock(self.model, self._world), _sums(self.model, self._world)
        self.settle()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(self.module.state_dict())
        self._load_packed(state)

    def layers(self, sent: float | None) -> list[LayerRecord]:
        """Of all workers: a boundary's activations are sent by one, their gradients by another."""
        return self._rows(*self._sums)

    def spans(self) -> list[TimeSpan]:
        return self._seen


def _on_one_clock(model: Pipeline, world: World) -> list[TimeSpan]:
    """Every stage's timeline of the last step, from its beginning; a barrier aligns the ranks' clocks."""
    barrier(group=world)
    now = time.perf_counter()
    rows = [(WAYS.index(s.way), s.kind == "wait", s.begin_s - now, s.end_s - s.begin_s) for s in model.timeline]
    most = int(all_gather(torch.tensor([len(rows)]), group=world).max())
    table = torch.full((most, 4), -1.0, dtype=torch.float64)
    table[: len(rows)] = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
    stages: Sequence[Tensor] = list(all_gather(table, group=world))
    kept = [(stage, each) for stage, rows in enumerate(stages) for each in rows.tolist() if each[0] >= 0]
    begun = min((each[2] for _, each in kept), default=0.0)
    return [
        TimeSpan(f"stage {stage}, {WAYS[int(way)]}", "wait" if waits else "compute", begin - begun, seconds)
        for stage, (way, waits, begin, seconds) in kept
    ]


def _sums(model: Pipeline, world: World) -> tuple[Counts, Counts]:
    """Bytes and values that crossed each boundary, over all ranks."""
    keys = [(name, way) for name in model.layout.boundaries for way in WAYS]
    own = torch.tensor([[counts[key] for key in keys] for counts in (model.traffic.sent_nbytes, model.traffic.numel)])
    totals = all_gather(own, group=world).sum(0).tolist()
    sent, numel = (dict(zip(keys, each, strict=True)) for each in totals)
    return {key: nbytes for key, nbytes in sent.items() if nbytes}, numel
