"""Parameters that are brought up to date when somebody touches them through their module.

Caller: `stream.py`. A module finds its parameters in a dictionary, `_parameters`: `self.weight`, `parameters()`,
`state_dict()`, `to()` and every forward come by it. While a job overlaps, the modules' dictionaries are ones that ask
first. So weights whose update is still under way are waited for exactly where they are needed, whoever needs them: a
layer, a tied layer, an evaluation, a checkpoint.

Recurrent layers keep a list of their weights beside the dictionary, and ask in a hook before their forward instead. A
parameter that is used by other ways yet is recognised by its gradient: see `Touches.seen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Ask = Callable[[Tensor], None]


class AskingParameters(dict[str, Any]):
    """A module's parameters by name; whoever takes one out lets `ask` bring it up to date first."""

    ask: Ask | None = None

    def _asked(self, value: Any) -> Any:
        # What torch.compile traces does not ask: the code that it makes takes its weights from here, which does.
        if value is not None and self.ask is not None and not torch.compiler.is_compiling():
            self.ask(value)
        return value

    def __getitem__(self, name: str) -> Any:
        return self._asked(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._asked(super().get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        return self._asked(super().pop(name, *default))

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:  # copies and pickles of a model are plain ones
        return dict, (self.items(),)

    def __deepcopy__(self, memory: dict[int, Any]) -> dict[str, Any]:
        from copy import deepcopy

        return {name: deepcopy(value, memory) for name, value in self.items()}


class _AskBefore:
    """A hook before a forward: takes the module's parameters from its dictionary, which asks. It is copied freely."""

    def __call__(self, module: nn.Module, _: object) -> None:
        module._parameters.values()


class Touches:
    """The asking dictionaries of a model's modules, as long as a job overlaps.

    Attributes:
        seen: ids of the parameters that were touched since it was last cleared.
    """

    def __init__(self, model: nn.Module, ask: Ask) -> None:
        self._ask = ask
        self._modules = [module for module in model.modules() if module._parameters]
        self._handles: list[Any] = []
        self.seen: set[int] = set()
        for module in self._modules:
            asking = AskingParameters(module._parameters)
            asking.ask = self._touched
            module.__dict__["_parameters"] = asking
            if isinstance(module, nn.RNNBase):
                self._handles.append(module.register_forward_pre_hook(_AskBefore()))

    def _touched(self, parameter: Tensor) -> None:
        self.seen.add(id(parameter))
        self._ask(parameter)

    def _asking(self) -> Iterator[tuple[nn.Module, AskingParameters]]:
        for module in self._modules:
            if isinstance(found := module.__dict__["_parameters"], AskingParameters):
                yield module, found

    def close(self) -> None:
        """Give the modules plain dictionaries again."""
        for module, asking in self._asking():
            asking.ask = None
            module.__dict__["_parameters"] = dict(asking.items())
        for handle in self._handles:
            handle.remove()
        self._modules, self._handles = [], []
