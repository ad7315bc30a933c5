"""Runs a training step of a model on shapes alone, and notes what every layer computes, saves and allocates.

Callers: `cost.py`. The tensors are on torch's "meta" device, which has shapes but no memory (`shapes.py`); so a step of
VGG takes a second and no gigabytes. Two things are different there from a processor, and are put right: attention takes
the fused kernel that a processor takes, and what a recurrent layer saves is only known from running it.

Every storage is followed from the operator that makes it to its end: so the peak is that of the step, with what
backward and the optimiser make, and not a sum of what layers say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laconic.operators.shape import Convolution
from laconic.planner.counting import count
from laconic.planner.shapes import Shapes


@dataclass
class TracedModel:
    """What one module ran itself, not through its children.

    Attributes:
        module: its name in the model; empty for the model itself.
        calls: how often it ran.
        saved: bytes of each storage that it was the first to save for backward.
        moved_nbytes: read and written by its operators.
        trains_input: whether the gradient of its input is wanted.
    """

    module: str
    kind: str
    calls: int = 0
    output_nbytes: int = 0
    output_shape: tuple[int, ...] = ()
    saved_nbytes: int = 0
    moved_nbytes: int = 0
    multiply_adds: int = 0
    work: int = 0
    depth: int = 0
    trains_input: bool = False
    convolution: Convolution | None = None


@dataclass
class Trace:
    """What a step does.

    Attributes:
        layers: by the module's name, in the order of their first call.
        depth: the longest path through the forward pass.
        backward_multiply_adds: of the gradients.
        uncounted: operators that multiply, and whose multiply-adds are not counted.
        saved_nbytes: what all layers keep for backward, each storage once.
        peak_nbytes: the most that is allocated at once in a step, with weights, gradients and the optimiser's state.
    """

    layers: dict[str, TracedModel] = field(default_factory=dict)
    depth: int = 0
    backward_multiply_adds: int = 0
    uncounted: set[str] = field(default_factory=set)
    saved_nbytes: int = 0
    peak_nbytes: int = 0
    backward_peak_nbytes: int = 0


class Watch(TorchDispatchMode):
    """Counts every operator, and follows every storage."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.names = names
        self.stack: list[TracedModel] = []
        self.backward = False
        self._live: dict[int, int] = {}
        self._depth: dict[int, int] = {}
        self._saved: set[int] = set()
        self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        counted = count(func, args, made)
        if not counted.whole:
            self.trace.uncounted.add(func._schema.name)
        depth = counted.depth + max((self._depth.get(_storage(each), 0) for each in read), default=0)
        for each in made:
            self.follow(each)
            self._depth[_storage(each)] = max(depth, self._depth.get(_storage(each), 0))
        if self.backward:
            self.trace.backward_multiply_adds += counted.multiply_adds
        elif self.stack:
            layer = self.stack[-1]
            layer.multiply_adds += counted.multiply_adds
            layer.work += counted.work
            layer.depth += counted.depth
            layer.moved_nbytes += sum(_nbytes(each) for each in (*read, *made)) if counted.work else 0
            self.trace.depth = max(self.trace.depth, depth)
            if func is torch.ops.aten.convolution.default and not args[6]:
                layer.convolution = _sizes(args)
        return out

    def follow(self, tensor: Tensor) -> None:
        """Count a storage until nothing refers to it any more; a sparse tensor has none of its own."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.trace.peak_nbytes = max(self.trace.peak_nbytes, self._now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)
        self._depth.pop(key, None)

    def pack(self, tensor: Tensor) -> Tensor:
        """Note what autograd saves; weights, and what was saved before, do not count again."""
        if tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if not self.backward and storage._cdata not in self._saved and not isinstance(tensor, nn.Parameter):
            self._saved.add(storage._cdata)
            self.trace.saved_nbytes += storage.nbytes()
            if self.stack:
                self.stack[-1].saved_nbytes += storage.nbytes()
        return tensor

    def exempt(self, tensors: Iterable[Tensor]) -> None:
        """Storages that are there anyway: weights and buffers are not among what is saved."""
        self._saved |= {_storage(each) for each in tensors}

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        name = self.names.get(id(module), "")
        layer = self.trace.layers.setdefault(name, TracedModel(name, type(module).__name__))
        layer.calls += 1
        layer.trains_input |= any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        self.stack.append(layer)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        layer = self.stack.pop()
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        layer.output_nbytes += sum(_nbytes(each) for each in made)
        layer.output_shape = tuple(made[0].shape) if made else ()


class CpuAttention(TorchFunctionMode):
    """Attention on shapes alone goes by the kernel that a processor uses, which saves no matrix of scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention and not given.get("dropout_p") and len(args) == 3:
            plain = {key: given[key] for key in ("is_causal", "attn_mask", "scale") if given.get(key) is not None}
            if args[0].dim() == 4 and args[0].is_meta:
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **plain)[0]
        return func(*args, **given)


def step(
    model: nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None, shapes: Shapes | None = None,
) -> Trace:  # fmt: skip
    """Trace a training step of `model` on `inputs`; without an optimiser the forward pass, in evaluation mode.

    Given `shapes`, in which a model on "meta" and its inputs were made, nothing is computed.
    """
    watch = Watch({id(module): name for name, module in model.named_modules(remove_duplicate=False)})
    model.train(optimizer is not None)
    trained = [p for p in model.parameters() if p.requires_grad]
    rule = optimizer(trained) if optimizer is not None and trained else None
    if rule is not None:
        _fill_state(rule, trained)
    held = [*model.parameters(), *model.buffers(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))]
    if rule is not None:
        held += [leaf for leaf in tree_leaves(rule.state_dict()["state"]) if isinstance(leaf, Tensor)]
    for tensor in held:
        watch.follow(tensor)
    watch.exempt([*model.parameters(), *model.buffers()])
    with _watched(watch, shapes), torch.set_grad_enabled(rule is not None):
        with torch.device("cpu" if shapes is None else "meta"):
            total = loss(model(*inputs))
        watch.backward = True
        if rule is not None and total.requires_grad:
            total.backward()
            watch.trace.backward_peak_nbytes = watch.trace.peak_nbytes
            rule.step()
    return watch.trace


def _fill_state(rule: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Take a step with gradients of zero, so that the optimiser's state is there as in every step but the first."""
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    rule.step()
    rule.zero_grad()


@contextmanager
def _watched(watch: Watch, shapes: Shapes | None) -> Iterator[None]:
    with ExitStack() as stack:
        if shapes is not None:
            stack.enter_context(shapes)
        pre = nn.modules.module.register_module_forward_pre_hook(watch.enter)
        post = nn.modules.module.register_module_forward_hook(watch.leave)
        stack.callback(pre.remove)
        stack.callback(post.remove)
        stack.enter_context(CpuAttention())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor))
        stack.enter_context(watch)
        yield


def _sizes(args: Any) -> Convolution | None:
    x, weight, _, stride, padding, dilation, _, _, groups = args[:9]
    axes = weight.dim() - 2
    if axes > 2 or x.dim() != weight.dim():
        return None
    steps, edges, gaps = (tuple(each) * (axes if len(each) == 1 else 1) for each in (stride, padding, dilation))
    return Convolution(x.shape[0], x.shape[1], weight.shape[0], tuple(x.shape[2:]), tuple(weight.shape[2:]), steps,
                       edges, gaps, groups)  # fmt: skip


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
