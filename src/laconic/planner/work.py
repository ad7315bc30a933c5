"""Time of each layer, forward and backward: measured on this machine, or from a device's description.

Callers: `laconic profile`, `predict.py`. Measurements are kept by processor, threads, torch and the layers' shapes
(`operators.machine`), so that foreign or stale ones are never used.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from laconic.operators.machine import measurements
from laconic.operators.timing import Load
from laconic.planner.cost import Cost, sum_of_outputs
from laconic.planner.devices import Device
from laconic.planner.subject import Subject

_REPEATS = 7
UNSTEADY = 0.2  # steps that differ by more were disturbed


@dataclass(frozen=True)
class LayerTime:
    """A layer's seconds for the batch, and what it would send."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    parameters: int
    output_nbytes: int

    def times(self, factor: float) -> LayerTime:
        """The same layer, so many times as slow."""
        return replace(self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s)


@dataclass(frozen=True)
class Work:
    """How long a step takes on one machine.

    Attributes:
        layers: in the order of the forward pass.
        batch: samples that the times are for.
        optimizer_s: of the optimiser's step, for all parameters.
        spread: of a step's time, its standard deviation relative to the median.
        source: "measured here", or the device's name.
        busy: others had the cores while it was measured, so that the times are unsure.
    """

    layers: tuple[LayerTime, ...]
    batch: int
    optimizer_s: float
    spread: float
    source: str
    busy: bool = False

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s


def estimate(cost: Cost, device: Device, batch: float | None = None) -> Work:
    """The times that a device's description gives, for another batch than the cost's if asked; work grows with it."""
    scale = 1.0 if batch is None else batch / cost.batch
    layers = []
    for layer in cost.layers:
        moved = max(0.0, layer.moved_nbytes - layer.weight_nbytes) * scale + layer.weight_nbytes
        forward = device.seconds(layer.multiply_adds * scale, moved, layer.calls)
        backward = device.seconds(layer.backward_multiply_adds * scale, 2 * moved, layer.calls) if moved else 0.0
        nbytes = int(layer.output_nbytes * scale)
        layers.append(LayerTime(layer.name, layer.kind, forward, backward, layer.parameters, nbytes))
    state = cost.optimizer_nbytes + 3 * cost.total("weight_nbytes")  # read gradient and weight, write weight
    optimizer_s = (state + cost.optimizer_nbytes) / device.bandwidth_Bps
    return Work(tuple(layers), round(cost.batch * scale) or 1, optimizer_s, 0.03, device.name, device.busy)


def measure(chosen: Subject, cost: Cost, folder: Path | None, again: bool = False) -> Work:
    """The times measured on this machine, or those that were measured here before; unsure ones are not kept."""
    found = None if again else known(cost, folder)
    if found is None:
        found = _measured(chosen, cost)
        if not found.busy:
            measurements(folder, "planner").put(key_of(cost), found, Work)
    return found


def known(cost: Cost, folder: Path | None) -> Work | None:
    """Earlier measurements on this machine of these layers and this batch, if any."""
    found = measurements(folder, "planner").get(key_of(cost), Work)
    return found if found is not None and found.seconds > 0 else None


def key_of(cost: Cost) -> str:
    """The shapes that the times depend on."""
    shapes = [(each.kind, each.calls, each.parameters, each.output_shape, each.multiply_adds) for each in cost.layers]
    digest = hashlib.sha256(repr((shapes, cost.optimizer_nbytes)).encode()).hexdigest()[:16]
    return f"step {cost.batch} {digest} by processor time"


class _Clock:
    """Notes when each module begins and ends, forward and backward; a layer's time is without its children's.

    The time is this thread's own, as in `devices`; autograd computes backward on the processor in the same thread.
    """

    def __init__(self) -> None:
        self._now = time.thread_time
        self.forward: dict[str, float] = {}
        self.begun: list[tuple[float, str]] = []
        self._stack: list[list[Any]] = []

    def hook(self, model: nn.Module) -> list[Any]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave(name)))
        return handles

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda module, inputs: self._stack.append([self._now(), 0.0])

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            begun, children = self._stack.pop()
            took = self._now() - begun
            self.forward[name] = self.forward.get(name, 0.0) + took - children
            if self._stack:
                self._stack[-1][1] += took
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(
                        lambda gradient: self.begun.append((self._now(), name))
                    )
                    break

        return leave

    def backward(self, ended: float) -> dict[str, float]:
        """A layer's backward lasts from its output's gradient to the next one's."""
        times: dict[str, float] = {}
        marks = [*sorted(self.begun), (ended, "")]
        for (begun, name), (after, _) in itertools.pairwise(marks):
            times[name] = times.get(name, 0.0) + after - begun
        return times


def _losses(chosen: Subject, batch: int) -> Callable[[nn.Module, int], Tensor]:
    """The loss of a step: of the workload's own samples, or of random ones."""
    if chosen.workload is not None:
        task = replace(chosen.workload, batch=batch).prepare()
        return lambda model, step: task.loss(model, task.batch(0, step % task.steps_per_epoch()))
    x = chosen.inputs(batch, "cpu")
    if x.is_floating_point():
        x.normal_()
    return lambda model, step: sum_of_outputs(model(x))


def _measured(chosen: Subject, cost: Cost) -> Work:
    torch.manual_seed(0)
    model = chosen.model("cpu").train()
    rule, loss_of = chosen.optimizer(model.parameters()), _losses(chosen, cost.batch)
    forward: dict[str, list[float]] = {}
    backward: dict[str, list[float]] = {}
    optimizer, steps, now = [], [], time.thread_time
    load = Load()
    for repeat in range(_REPEATS + 2):
        watch = _Clock()
        handles = watch.hook(model)
        begun = now()
        rule.zero_grad()
        loss = loss_of(model, repeat)
        loss.backward()
        ended = now()
        rule.step()
        done = now()
        for handle in handles:
            handle.remove()
        if repeat < 2:  # allocates, and compiles kernels
            load = Load()
            continue
        optimizer.append(done - ended)
        steps.append(done - begun)
        for kept, found in ((forward, watch.forward), (backward, watch.backward(ended))):
            for name, seconds in found.items():
                kept.setdefault(name, []).append(seconds)
    root, busy = type(model).__name__, load.busy

    def median(kept: dict[str, list[float]], name: str) -> float:
        return statistics.median(kept.get("" if name == root else name, [0.0]))

    layers = [
        LayerTime(each.name, each.kind, median(forward, each.name), median(backward, each.name), each.parameters,
                  each.output_nbytes)
        for each in cost.layers
    ]  # fmt: skip
    told = sum(layer.forward_s + layer.backward_s for layer in layers)
    whole = statistics.median(steps) - statistics.median(optimizer)
    scale = whole / told if told else 1.0  # what lies between layers, and the containers that compute nothing
    layers = [each.times(scale) for each in layers]
    spread = statistics.pstdev(steps) / statistics.median(steps)
    busy = busy or spread > UNSTEADY
    return Work(tuple(layers), cost.batch, statistics.median(optimizer), spread, "measured here", busy)
