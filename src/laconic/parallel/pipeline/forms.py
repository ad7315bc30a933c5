"""The shapes and dtypes that cross the cuts for a given batch shape, found without computing or communicating.

Caller: `pipeline.py`, once for each shape of a micro-batch. Every rank runs the whole model on tensors that have a
shape and no values (torch's fake tensors), so receives can be posted before anything is sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from laconic.errors import BadInput


@dataclass(frozen=True)
class TensorForm:
    """A tensor that crosses: its shape for one micro-batch, its dtype, and whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class ConstantForm:
    """A value other than a tensor, such as a size, that follows from the shapes and is not sent."""

    value: Any


Forms = dict[str, TensorForm | ConstantForm]
_CPU = torch.device("cpu")


class Outline:
    """A model without values, for finding the forms of the values it computes."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._mode = FakeTensorMode()
        self._module = fx.GraphModule(_mapped(model, self._mode.from_tensor), graph)
        self._known: dict[Any, Forms] = {}
        first = next((each.device for each in model.parameters()), _CPU)
        self._device = _CPU if first.type == "meta" else first

    def forms(self, inputs: Sequence[Tensor], names: Sequence[str]) -> Forms:
        """The forms of the values called `names`, where the model is given tensors of the inputs' shapes.

        Raises:
            BadInput: the model does not take such inputs, or its shapes depend on values.
        """
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = (autocast, *((tuple(each.shape), each.dtype) for each in inputs))
        if key not in self._known:
            self._known[key] = self._found(inputs, names)
        return self._known[key]

    def _found(self, inputs: Sequence[Tensor], names: Sequence[str]) -> Forms:
        found: Forms = {}

        class Recorder(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                if n.name in names:
                    found[n.name] = _form(n.name, value)
                return value

        try:
            with self._mode, torch.enable_grad(), torch.random.fork_rng(devices=[]):
                given = [torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in inputs]
                Recorder(self._module).run(*given)
        except BadInput:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(each.shape)) for each in inputs)
            raise BadInput(
                f"the model does not take a micro-batch of {shapes}, or its forward branches on values: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return found


def _form(name: str, value: Any) -> TensorForm | ConstantForm:
    if isinstance(value, Tensor):
        return TensorForm(tuple(value.shape), value.dtype, value.requires_grad)
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        raise BadInput(f"'{name}', which crosses a cut, holds several tensors; cut after what takes it apart")
    return ConstantForm(value)


def _mapped(model: nn.Module, mapped: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with other tensors, made without copying those it has."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): mapped(tensor) for tensor in tensors})
