"""Cost of a model: parameters, bytes, work, depth, memory of a training step and energy, by layer and in total.

Callers: `laconic cost`, `laconic.cost`, and everything that plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from laconic.errors import BadInput, LaconicError
from laconic.planner import formulas
from laconic.planner.shapes import NeedsValues, Shapes
from laconic.planner.subject import Subject, subject
from laconic.planner.trace import Trace, step

RUN_ONCE = "A step was run once for real on this processor: what an LSTM's kernel saves, only the kernel knows."
NO_CACHE = "The cache for generating text was switched off (use_cache=False)."


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for a batch, forward. A layer that runs twice works twice and has its weights once.

    Attributes:
        name: of the module; a module with children appears for what it computes itself.
        kind: its class.
        calls: in one forward pass.
        parameters: values that it trains; what it shares with an earlier layer counts there.
        weight_nbytes, gradient_nbytes: of these.
        output_nbytes: what its calls return.
        output_shape: of the last call.
        saved_nbytes: kept for backward and not kept by an earlier layer.
        moved_nbytes: read and written by its operators.
        multiply_adds: products that are summed.
        work: W, with one for a multiply-add and one for any other operation on a value.
        depth: D, the longest path through the layer.
        backward_multiply_adds: of its gradients: as many again for the weights, and for the input where that is wanted.
        amplification: values that im2col writes for each value in; None where it is no convolution.
        methods: (W, D) of a convolution by each method.
    """

    name: str
    kind: str
    calls: int
    parameters: int
    weight_nbytes: int
    gradient_nbytes: int
    output_nbytes: int
    output_shape: tuple[int, ...]
    saved_nbytes: int
    moved_nbytes: int
    multiply_adds: int
    work: int
    depth: int
    backward_multiply_adds: int
    amplification: float | None
    methods: dict[str, tuple[float, int]]

    @property
    def parallelism(self) -> float:
        """W/D: how many processors it can keep busy on average."""
        return self.work / self.depth if self.depth else 0.0


@dataclass(frozen=True)
class Cost:
    """What a model costs for a batch.

    Attributes:
        layers: in the order in which they run.
        depth: of the forward pass: the longest path, which branches side by side do not lengthen.
        optimizer_nbytes: the optimiser's state.
        training_nbytes: the most that is allocated at once in a training step.
        uncounted: operators that multiply, forward or backward, and whose multiply-adds are not in the totals.
        notes: sentences on how the model was followed, where that needs saying.
    """

    name: str
    batch: int
    sample: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    depth: int
    buffer_nbytes: int
    input_nbytes: int
    saved_nbytes: int
    optimizer_nbytes: int
    training_nbytes: int
    backward_multiply_adds: int
    uncounted: tuple[str, ...]
    notes: tuple[str, ...]

    def total(self, field: str) -> int:
        """The sum over the layers."""
        return sum(getattr(layer, field) for layer in self.layers)

    @property
    def dram_words(self) -> float:
        """32-bit accesses a sample, forward: weights once a batch, every output written once and read once."""
        return (self.total("weight_nbytes") + 2 * self.total("output_nbytes")) / 4 / self.batch

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the layers and the totals."""
        sums = ("parameters", "weight_nbytes", "gradient_nbytes", "output_nbytes", "multiply_adds", "work")
        total: dict[str, Any] = {name: self.total(name) for name in sums}
        total |= {
            "operations": total["work"] + total["multiply_adds"],
            "backward_multiply_adds": self.backward_multiply_adds,
            "depth": self.depth,
            "parallelism": total["work"] / max(1, self.depth),
            "saved_nbytes": self.saved_nbytes,
            "optimizer_nbytes": self.optimizer_nbytes,
            "training_nbytes": self.training_nbytes,
            "weight_joules_per_sample": formulas.dram_joules(total["parameters"] / self.batch),
            "joules_per_sample": formulas.dram_joules(self.dram_words),
        }
        head = {"model": self.name, "batch": self.batch, "sample": self.sample,
                "uncounted": self.uncounted, "notes": self.notes}  # fmt: skip
        return {**head, "layers": [asdict(layer) for layer in self.layers], "total": total}


def cost(
    model: str | nn.Module | Subject, batch: int | None = None, sample: Sequence[int] | None = None,
    dtype: str | None = None, optimizer: str | None = None, train: bool = True,
) -> Cost:  # fmt: skip
    """Count what a model costs, without computing it.

    >>> found = cost("vgg16")
    >>> found.total("parameters"), found.total("multiply_adds")
    (138357544, 15470264320)

    Args:
        model: a network or workload by name, `module:factory`, or an nn.Module.
        batch: samples a step; None is the workload's, or 1.
        sample: shape of one input, where the model does not declare it.
        dtype: of the input, "int64" for numbers of tokens.
        optimizer: "sgd", "momentum", "rmsprop" or "adam"; None is the workload's, or momentum.
        train: count a training step; else the model in evaluation mode, without gradients.

    Raises:
        BadInput: the model cannot be built or run on this input.
    """
    chosen = model if isinstance(model, Subject) else subject(model, sample, dtype, optimizer)
    size = chosen.batch if batch is None else batch
    if size < 1:
        raise BadInput(f"--batch must be at least 1, got {size}")
    built, trace, notes = _traced(chosen, size, train)
    return _cost(chosen, size, built, trace, notes)


def _traced(chosen: Subject, batch: int, train: bool) -> tuple[nn.Module, Trace, tuple[str, ...]]:
    """On shapes alone; a model with an LSTM is trained for real, at the cost of a step. Returns what was done, too."""
    shapes, rule = Shapes(), chosen.optimizer if train else None
    try:
        with shapes:
            built = chosen.model("meta")
            x = chosen.inputs(batch, "meta")
        if train and any(isinstance(module, nn.LSTM) for module in built.modules()):
            built = chosen.model("cpu")
            notes = _without_cache(built)
            trace = step(built, (chosen.inputs(batch, "cpu"),), sum_of_outputs, rule)
            return built, trace, (*notes, RUN_ONCE)
        notes = _without_cache(built)
        return built, step(built, (x,), sum_of_outputs, rule, shapes), notes
    except LaconicError:
        raise
    except NeedsValues as error:
        raise BadInput(f"'{chosen.name}' cannot be followed on shapes alone: {error}; nothing was computed") from error
    except Exception as error:  # whatever a user's model raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        shape = "×".join(map(str, (batch, *chosen.sample)))
        raise BadInput(
            f"'{chosen.name}' cannot be run on an input of shape {shape}: {reason[:200]}; give the shape of one input "
            "by --input-shape, its type by --input-type, and --batch 2 or more for batch normalisation"
        ) from error


def _without_cache(model: nn.Module) -> tuple[str, ...]:
    """Switch off the cache that transformers' models keep for generating text, and say so."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    found = [each for each in configs if getattr(each, "use_cache", False) is True]
    for config in found:
        config.use_cache = False
    return (NO_CACHE,) if found else ()


def sum_of_outputs(output: Any) -> Tensor:
    """A loss that depends on every output."""
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not outputs:
        raise BadInput("the model returns no floating-point tensor, of which a loss could be taken")
    return torch.stack([each.sum() for each in outputs]).sum()


def _cost(chosen: Subject, batch: int, model: nn.Module, trace: Trace, notes: tuple[str, ...]) -> Cost:
    seen: set[int] = set()
    layers = []
    for name, module in model.named_modules(remove_duplicate=False):
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(p) for p in own}
        traced = trace.layers.get(name)
        if own or (traced is not None and traced.work):
            layers.append((traced, name, module, own))
    order = {name: place for place, name in enumerate(trace.layers)}
    layers.sort(key=lambda each: order.get(each[1], len(order)))
    found = []
    for traced, name, module, own in layers:
        numel, nbytes = sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
        trained = sum(p.numel() * p.element_size() for p in own if p.requires_grad)
        conv = traced.convolution if traced else None
        has_weights = any(p.requires_grad for p in module.parameters(recurse=False))
        factor = int(has_weights) + int(bool(traced and traced.trains_input))
        if not has_weights and traced and traced.multiply_adds:
            factor = 2  # attention: both sides of each product want a gradient
        found.append(LayerCost(
            name or type(module).__name__, type(module).__name__, traced.calls if traced else 0, numel, nbytes, trained,
            traced.output_nbytes if traced else 0, traced.output_shape if traced else (),
            traced.saved_nbytes if traced else 0, traced.moved_nbytes if traced else 0,
            traced.multiply_adds if traced else 0, traced.work if traced else 0, traced.depth if traced else 0,
            factor * (traced.multiply_adds if traced else 0),
            formulas.amplification(conv) if conv else None, formulas.methods(conv) if conv else {},
        ))  # fmt: skip
    x = chosen.inputs(batch, "meta")
    return Cost(
        chosen.name, batch, chosen.sample, tuple(found), trace.depth, sum(b.numel() * b.element_size() for b in
        model.buffers()), x.numel() * x.element_size(), trace.saved_nbytes, _state_nbytes(chosen, model),
        trace.peak_nbytes, trace.backward_multiply_adds, tuple(sorted(trace.uncounted)), notes,
    )  # fmt: skip


def _state_nbytes(chosen: Subject, model: nn.Module) -> int:
    """The optimiser's state for this model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return 0
    rule = chosen.optimizer([nn.Parameter(torch.empty_like(p, device="meta")) for p in trained])
    for group in rule.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    rule.step()
    state = [leaf for leaf in tree_leaves(rule.state_dict()["state"]) if isinstance(leaf, Tensor)]
    return sum(each.numel() * each.element_size() for each in state)
