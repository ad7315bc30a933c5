"""`laconic.tune` and its inverse, `untune`: compute a model's convolutions by the fastest methods within a tolerance.

Callers: users, benchmarks. A layer is replaced only if that is faster, and keeps its parameters and state-dict keys.
Layers with hooks, parametrisations or a class of their own are left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.operators.convolve import flushed_denormals
from laconic.operators.machine import measurements
from laconic.operators.method_error import checked_tolerance
from laconic.operators.micro_batch import sizes
from laconic.operators.model_error import evaluating, gradient_noise, gradients_of, model_error, tensors
from laconic.operators.plan import OperatorRow, TuningPlan
from laconic.operators.search import Limits, MethodChoice, choose, least_workspace
from laconic.operators.shape import Convolution, of_tensors, on_both_sides
from laconic.operators.timing import race
from laconic.operators.tuned_layers import TUNED, TunedLayer, tuned_layer
from laconic.quantities import parse_nbytes
from laconic.storage.files import cache_folder
from laconic.storage.memo import Memo

log = logging.getLogger("laconic.operators")
_SECONDS = 40.0  # of measurements: the last layer and the check of the whole take up to 20 more
_LATE = "not measured: the time was up"
_PLANS: WeakKeyDictionary[nn.Module, TuningPlan] = WeakKeyDictionary()
Seen = dict[str, dict[Convolution, Tensor]]  # samples; those that need a gradient say so


def tune(model: nn.Module, example: Any, tolerance: float | str = 1e-5, workspace: str | int = "64MiB",
         train: bool = False, policy: str = "powers", cache: str | Path | None = "default") -> nn.Module:  # fmt: skip
    """Compute the convolutions of a model by the fastest methods within the tolerance.

    The model is changed in place and returned; `plan_of(model)` is the table of what was decided. Its
    tuned layers flush denormal numbers to zero, as they slow arithmetic a hundredfold; all else keeps its mode.
    Measuring ends after a minute: layers that are not reached run as before, and it is their turn when the model is
    tuned again, with a cache.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> tuned = tune(model, torch.zeros(1, 3, 16, 16), cache=None)
    >>> list(tuned.state_dict()) == ["0.weight", "0.bias"], plan_of(tuned).rows[0].layer
    (True, '0')
    >>> type(untune(tuned)[0]).__name__
    'Conv2d'

    Args:
        model: on the CPU.
        example: an input, or a tuple of inputs; other shapes than its run as before.
        tolerance: largest error of a layer and of the model's output, relative to the largest value; "native" admits
            what is no worse than the plain sum in float32.
        workspace: most memory a layer may use beside its input, weights and output, "64MiB" or bytes.
        train: tune the gradients too, with weights that change in every step.
        policy: how a layer's batch may be divided: "undivided", "powers" of two, "all".
        cache: folder of measurements; "default" is the user's cache folder, None measures and keeps nothing.

    Raises:
        BadInput: an example that does not run, a tolerance that nothing meets, a workspace below the least.
    """
    limits = Limits(checked_tolerance(tolerance), parse_nbytes(workspace, "workspace"), policy, train)
    sizes(policy, 1)
    inputs = example if isinstance(example, tuple) else (example,)
    untune(model)
    kept = measurements(cache_folder() if cache == "default" else None if cache is None else Path(cache))
    key = _signature(model, inputs, limits)
    plan = _from_cache(kept, key, model)
    if plan is None:
        with flushed_denormals():
            model, plan = _measured(model, inputs, limits, kept)
        if not any(row.left_alone == _LATE for row in plan.rows):
            kept.put(key, tuple(plan.rows), tuple[OperatorRow, ...])
    else:
        model = _apply(model, plan, train)
    _PLANS[model] = plan
    return model


def untune(model: nn.Module) -> nn.Module:
    """Restore torch's own layers, with the parameters as they are now; returns the model.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
    >>> tuned = tune(model, torch.randn(1, 3, 32, 32), cache=None)
    >>> type(untune(tuned)[0])
    <class 'torch.nn.modules.conv.Conv2d'>
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, TunedLayer):
                parent._modules[name] = _restored(child)
    _PLANS.pop(model, None)
    return _restored(model) if isinstance(model, TunedLayer) else model


def _restored(layer: TunedLayer) -> nn.Module:
    original = layer.original[0]
    original.training = layer.training
    return original


def plan_of(model: nn.Module) -> TuningPlan:
    """The plan of a tuned model: a table of what was decided, which can be printed.

    Raises:
        BadInput: the model is not tuned.
    """
    if (plan := _PLANS.get(model)) is None:
        raise BadInput("this model is not tuned: laconic.tune(model, example) makes a plan of it")
    return plan


def _measured(model: nn.Module, inputs: tuple[Any, ...], limits: Limits, kept: Memo) -> tuple[nn.Module, TuningPlan]:
    """Tune every layer that the example passes, and check the model as a whole; the tuned model and its plan."""
    seen, native = _observe(model, inputs, limits.train)
    every = [(name, conv) for name, convs in seen.items() for conv in convs]
    least = min((least_workspace(conv) for _, conv in every), default=0)
    if limits.workspace_nbytes < least < float("inf"):
        raise BadInput(
            f"a workspace of {limits.workspace_nbytes} bytes is below the least that any method needs here, {least}"
        )
    named, plan, end = dict(model.named_modules()), TuningPlan(), time.monotonic() + _SECONDS
    left = len(every)
    with _progress(len(every)) as step:
        for name, module in named.items():
            why = _left_alone(module)
            if why:
                plan.rows.append(OperatorRow(name, None, left_alone=why))
            for conv, x in seen.get(name, {}).items():
                step(name)
                found = _choices(module, conv, x, limits, kept, (end - time.monotonic()) / left)
                plan.rows.append(OperatorRow(name, conv, tuple(found), _LATE if not found else ""))
                left -= 1
    return _whole(model, plan, inputs, native, limits)


def _whole(
    model: nn.Module, plan: TuningPlan, inputs: tuple[Any, ...], native: list[Tensor], limits: Limits
) -> tuple[nn.Module, TuningPlan]:
    """The model as planned, without what puts its output off or makes it slower as a whole."""
    tuned = _near_enough(model, plan, inputs, native, limits)
    if not any(row.gains for row in plan.rows):
        return tuned, plan
    plan.speedup = _whole_speedup(tuned, inputs, limits)
    # What a layer leaves to the next one in another order of memory may cost more than the layer gains.
    other = TuningPlan([row.in_order() for row in plan.rows])
    if other.rows != plan.rows:
        tuned = _near_enough(untune(tuned), other, inputs, native, limits)
        if any(row.gains for row in other.rows):
            other.speedup = _whole_speedup(tuned, inputs, limits)
        if (other.speedup or 1.0) > plan.speedup:
            plan = other
        else:
            tuned = _apply(untune(tuned), plan, limits.train)
    if plan.speedup is not None and plan.speedup < 1:
        slower, tuned = "native: the whole would be slower", untune(tuned)
        rows = [OperatorRow(row.layer, row.convolution, (), slower) if row.gains else row for row in plan.rows]
        plan = TuningPlan(rows, plan.error)
    log.info("error %s, speed-up %s", plan.error, plan.speedup)
    return tuned, plan


def _near_enough(
    model: nn.Module, plan: TuningPlan, inputs: tuple[Any, ...], native: list[Tensor], limits: Limits
) -> nn.Module:
    """The model tuned, the worst role of the worst layer by torch's own until the whole is within the tolerance.

    Gradients are near enough, too, if they are no further off than torch's own may be: where a network picks maxima,
    the least difference picks another one.
    """
    noise = None if limits.train else 0.0
    while True:
        tuned = _apply(model, plan, limits.train)
        outputs, gradients = model_error(tuned, inputs, native, limits.train)
        plan.error = max(outputs, gradients if noise is None or gradients > noise else 0.0)
        gaining = [row for row in plan.rows if row.gains]
        if not gaining or limits.tolerance == "native" or plan.error <= float(limits.tolerance):
            return tuned
        if noise is None and outputs <= float(limits.tolerance):
            model = untune(tuned)
            noise = 2 * gradient_noise(model, inputs)
            continue
        worst = max(gaining, key=lambda row: row.error)
        plan.rows = [row.without_the_worst() if row is worst else row for row in plan.rows]
        model = untune(tuned)


def _choices(
    module: nn.Module, conv: Convolution, x: Tensor, limits: Limits, kept: Memo, seconds: float
) -> list[MethodChoice]:
    """What was chosen before, or is now within about so many seconds; nothing where there are none left."""
    key = f"layer {conv} {conv.dtype} {limits}" + (" with its input's gradient" if x.requires_grad else "")
    found = kept.get(key, tuple[MethodChoice, ...])
    if found is not None:
        return list(found)
    if seconds <= 0:
        return []
    races = (len(sizes(limits.policy, conv.batch)) + 2) * (3 if limits.train else 1)
    hurried = replace(limits, budget_s=min(limits.budget_s, seconds / races))
    chosen = choose(conv, x.detach(), module.weight, module.bias, hurried, x.requires_grad)  # type: ignore[arg-type]
    kept.put(key, tuple(chosen), tuple[MethodChoice, ...])
    return chosen


def _left_alone(module: nn.Module) -> str:
    """Why a convolution is not touched; empty for those that may be, and for other modules."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return ""
    if type(module) not in TUNED:
        return f"left alone: it is a {type(module).__name__}, not torch's own class"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for name in hooks):
        return "left alone: it has hooks"
    if "forward" in module.__dict__:
        return "left alone: its forward was replaced"
    if module.padding_mode != "zeros" or module.weight.dtype not in (torch.float32, torch.float64):
        return f"left alone: {module.padding_mode} padding, {module.weight.dtype}"
    return "" if _padding(module) is not None else "left alone: padding that differs between the sides"


def _padding(module: nn.Conv1d | nn.Conv2d) -> tuple[int, ...] | None:
    return on_both_sides(module.padding, module.kernel_size, module.dilation)


def _observe(model: nn.Module, inputs: tuple[Any, ...], train: bool) -> tuple[Seen, list[Tensor]]:
    """The convolutions that an example meets, with a sample of each input, and the model's outputs.

    With training a sample requires a gradient if the input did: the first layer's does not.
    """
    seen: Seen = {}

    def look(name: str, module: nn.Conv2d, x: Tensor) -> None:
        if x.dim() == module.weight.dim() and x.dtype == module.weight.dtype and x.device.type == "cpu" and x.numel():
            padding = _padding(module)
            assert padding is not None
            conv = of_tensors(x, module.weight, (module.stride, padding, module.dilation, module.groups))
            sample = x.detach()[:1].clone().requires_grad_(x.requires_grad)
            seen.setdefault(name, {}).setdefault(conv, sample)

    handles = []
    for name, module in model.named_modules():
        if type(module) in TUNED and not _left_alone(module):
            hook = lambda m, args, name=name: look(name, m, args[0])  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
    try:
        with evaluating(model), torch.set_grad_enabled(train):
            output = model(*inputs)
    except Exception as error:
        raise BadInput(f"the example does not run through the model: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return seen, [tensor.detach() for tensor in tensors(output)]


def _apply(model: nn.Module, plan: TuningPlan, train: bool) -> nn.Module:
    """Put tuned layers where they gain; a layer used in several places is one tuned layer."""
    named: dict[str, nn.Module] = dict(model.named_modules())
    made: dict[nn.Module, TunedLayer] = {}
    for name in dict.fromkeys(row.layer for row in plan.rows if row.gains):
        plans = [(row.convolution, list(row.choices)) for row in plan.rows if row.layer == name and row.gains]
        made[named[name]] = tuned_layer(named[name], plans, train)  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    return made.get(model, model)


def _whole_speedup(model: nn.Module, inputs: tuple[Any, ...], limits: Limits) -> float:
    """How much quicker the tuned model is as a whole, in turns with itself as torch computes it."""
    layers = [module for module in model.modules() if isinstance(module, TunedLayer)]

    def run(active: bool) -> None:
        for layer in layers:
            layer.active = active
        if limits.train:
            gradients_of(model, inputs)
        else:
            with evaluating(model), torch.no_grad():
                model(*inputs)

    found = race({"native": lambda: run(False), "tuned": lambda: run(True)}, 7, 2 * limits.budget_s, math.inf)
    return found["tuned"].speedup


def _signature(model: nn.Module, inputs: tuple[Any, ...], limits: Limits) -> str:
    """What a model's plan depends on, without running it."""
    parts = [f"{name} {type(m).__name__} {_left_alone(m)} {m.extra_repr()}" for name, m in model.named_modules()]
    parts += [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    parts += [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x) for x in inputs]
    return f"model {hashlib.sha256(json.dumps([*parts, repr(limits)]).encode()).hexdigest()}"


def _from_cache(kept: Memo, key: str, model: nn.Module) -> TuningPlan | None:
    layers, found = dict(model.named_modules()), kept.get(key, tuple[OperatorRow, ...])
    if found is None or any(row.layer not in layers for row in found):
        return None
    return TuningPlan(list(found), from_cache=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("tuning", total=total)
        yield lambda name: bar.update(task, advance=1, description=f"tuning {name}")
