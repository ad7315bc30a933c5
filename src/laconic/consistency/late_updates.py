"""Delay updates until their weights are used: which may be delayed, how use is detected, and one bucket's step.

Caller: `modes/sync.py`. Three things make a late update safe. `Habits` watches what a training loop does between two
steps, and says what can be hidden under it; the first steps are watched, and nothing is hidden in them. `Touches` lets
whoever takes a parameter from its module bring it up to date first. `BucketSteps` takes the optimiser's step bucket by
bucket: torch's optimisers treat every parameter by itself, so that a step over a part of the parameters, then over the
others, leaves the same bits as one over all. `step()` saves the groups' learning rates and other settings, because
schedulers change them before the delayed step is taken.

A module finds its parameters in a dictionary, `_parameters`: `self.weight`, `parameters()`, `state_dict()`, `to()` and
every forward come by it. While a job overlaps, the modules' dictionaries are ones that ask first. So weights whose
update is still under way are waited for exactly where they are needed, whoever needs them: a layer, a tied layer, an
evaluation, a checkpoint. Recurrent layers keep a list of their weights beside the dictionary, and ask in a hook before
their forward instead. A parameter that is used by other ways yet is recognised by its gradient: see `Touches.seen`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from laconic.exchange.layout import FlatBuffer
from laconic.exchange.state import CompressionState

WATCHED = 2  # steps
ALL_AT_ONCE = ("LBFGS", "SparseAdam")  # torch's optimisers whose parameters do not step each by itself
Ask = Callable[[Tensor], None]


@dataclass(frozen=True)
class Made:
    """A gradient as backward left it."""

    gradient: Tensor
    version: int
    summary: Tensor | None  # while a loop's habits are watched; where the gradient lies, so that nobody waits for it

    @classmethod
    def of(cls, gradient: Tensor, *, watched: bool) -> Made:
        return cls(gradient, gradient._version, _summary(gradient) if watched else None)

    def is_still(self, gradient: Tensor | None) -> bool:
        """Whether it is this gradient, as far as torch's own count of changes tells."""
        return gradient is not None and gradient is self.gradient and gradient._version == self.version


def are_still(made: Sequence[Made]) -> bool:
    """Whether no gradient changed by way of `.data`, as far as summaries show; waits once for all of them."""
    watched = [each for each in made if each.summary is not None]
    before = [each.summary for each in watched]
    now = [_summary(each.gradient) for each in watched]
    return not watched or torch.equal(torch.stack(before), torch.stack(now))  # type: ignore[arg-type]


def _summary(gradient: Tensor) -> Tensor | None:
    """The bits of sum and norm; none of a sparse gradient."""
    values = gradient.detach()
    if values.is_sparse:
        return None
    return torch.stack([values.sum().double(), torch.linalg.vector_norm(values).double()]).view(torch.int64)


class Habits:
    """The habits of one loop.

    Attributes:
        why_not: why updates are taken in `step()`; empty where they may wait for the next forward.
        why_late: why gradients are sent only in `step()`; empty where backward sends them.
        steps: how many have been seen.
        changed: gradients were changed between backward and a step.
        called: the loop communicated between backward and a step.
        kept: gradients were not None when backward began.
        apart: numbers of buckets with weights that are used otherwise than through their modules.
        holding: in how many `no_sync` backward runs now.
        made: how often each parameter's gradient was made in this step, by id.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: CompressionState) -> None:
        self._model, self._optimizer, self._buckets = model, optimizer, state.buckets
        self._factors = state.buckets.choice.names("factors")
        self.why_not = self.why_late = f"the first {WATCHED} steps are watched"
        self.steps = 0
        self.changed = self.called = self.kept = False
        self.holding = 0
        self._closures = False
        self.apart: set[int] = set()
        self.made: dict[int, int] = {}
        self._most: dict[int, int] = {}  # the most often each gradient was made before a step
        self._held = False  # an earlier backward of this step ran in `no_sync`

    def note_made(self, key: int) -> bool:
        """Count a gradient; return whether it is complete: no further backward is expected before the step."""
        self.made[key] = self.made.get(key, 0) + 1
        self._held = self._held or self.holding > 0
        return not self.holding and (self._held or self.made[key] == self._most.get(key))

    def end_step(self, buckets: int) -> None:
        """Note the end of a step of so many buckets, and decide what to overlap from now on."""
        for key, times in self.made.items():
            self._most[key] = max(times, self._most.get(key, 0))
        self.made, self._held = {}, False
        self.steps += 1
        if self._buckets.choice.learns:
            self.why_not = self.why_late = "codec auto still measures"
        elif self.steps >= WATCHED:
            self.why_late = self._why_late()
            self.why_not = self._why_now(buckets)

    def note_closure(self) -> None:
        """Note that the optimiser evaluates a closure."""
        self._closures = True
        self.why_not = _CLOSURE

    def look_at_optimizer(self) -> None:
        """Check for hooks added since the last step."""
        self.why_not = self.why_not or why_step_whole(self._optimizer)

    @property
    def watching(self) -> bool:
        """Whether the loop is still being watched, and nothing overlaps yet."""
        return self.steps < WATCHED

    def _why_late(self) -> str:
        if self.changed:
            return "gradients are changed between backward and step()"
        return "the loop communicates between backward and step()" if self.called else ""

    def _why_now(self, buckets: int) -> str:
        if self._closures:
            return _CLOSURE
        if self.kept:
            return "gradients are not set to None between two steps"
        if self._factors:
            return "codec factors looks at the forward that makes a gradient"
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in self._model.modules()):
            return "a compiled module does not ask for its weights one by one"
        if len(self.apart) == buckets:
            return f"all {_APART}"
        return why_step_whole(self._optimizer)

    def explain(self) -> str:
        """Say what overlaps, and why the rest does not."""
        sent = f"are sent in step(): {self.why_late}" if self.why_late else "are sent as backward makes them"
        late = f"is waited for in step(): {self.why_not}" if self.why_not else "is taken when the next forward needs it"
        apart = f"\n{len(self.apart)} buckets do not wait: {_APART}" if self.apart and not self.why_not else ""
        return f"gradients {sent}\na bucket's update {late}{apart}"


_APART = "weights are used otherwise than through their modules"
_CLOSURE = "the optimiser evaluates a closure"


class AskingParameters(dict[str, Any]):
    """A module's parameters by name; calls `ask` to bring a parameter up to date before returning it."""

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
        """Restore the modules' plain dictionaries."""
        for module, asking in self._asking():
            asking.ask = None
            module.__dict__["_parameters"] = dict(asking.items())
        for handle in self._handles:
            handle.remove()
        self._modules, self._handles = [], []


def why_step_whole(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimiser cannot step bucket by bucket; empty where it can."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in ALL_AT_ONCE:
        return f"{kind.__name__} is not known to treat every parameter by itself"
    if not getattr(kind.step, "hooked", False):
        return f"{kind.__name__}.step was replaced"
    everyone = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(everyone) or any(len(hooks) > 1 for hooks in own):
        return "the optimiser has other step hooks, which would find no gradients"
    return ""


class BucketSteps:
    """The optimiser's step, a bucket at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, buffers: Sequence[FlatBuffer]) -> None:
        self._optimizer = optimizer
        self._buffers = buffers
        self._groups: list[dict[str, Any]] = []
        self._members: list[list[tuple[int, list[nn.Parameter]]]] = []
        self._laid_out: list[list[int]] = []

    def begin(self) -> None:
        """Save the settings of a step: from here on they may change."""
        groups = self._optimizer.param_groups
        now = [[id(parameter) for parameter in group["params"]] for group in groups]
        if now != self._laid_out:
            self._lay_out(groups)
            self._laid_out = now
        self._groups = [
            {name: _kept(value) for name, value in group.items() if name != "params"} for group in groups
        ]

    def _lay_out(self, groups: Sequence[dict[str, Any]]) -> None:
        """Map each bucket to its parameters by group; parameters without a group are not stepped."""
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        self._members = []
        for buffer in self._buffers:
            members: dict[int, list[nn.Parameter]] = {}
            for parameter in buffer.parameters:
                if (group := group_of.get(id(parameter))) is not None:
                    members.setdefault(group, []).append(parameter)
            self._members.append(sorted(members.items()))

    def apply(self, bucket: int) -> None:
        """Step one bucket's parameters by the gradients in its buffer; leave their `.grad` as it is."""
        buffer, state = self._buffers[bucket], self._optimizer.state
        # Another thread may take this step, while the loop's own looks through the optimiser's groups and resets
        # gradients: they stay. So twins are stepped, which share memory with the weights.
        part = object.__new__(type(self._optimizer))
        part.__dict__.update(self._optimizer.__dict__)
        # A forward's settings are not the optimiser's: state that is made in an evaluation has to be trainable.
        with torch.inference_mode(False), torch.autocast(buffer.values.device.type, enabled=False):
            twins = {id(parameter): parameter.detach() for parameter in buffer.parameters}
            for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
                twins[id(parameter)].grad = view
            members = [(group, [twins[id(p)] for p in parameters]) for group, parameters in self._members[bucket]]
            part.param_groups = [{**self._groups[group], "params": params} for group, params in members]
            part.state = defaultdict(dict, {twins[id(p)]: state[p] for p in buffer.parameters if p in state})
            type(part).step.__wrapped__(part)  # type: ignore[attr-defined]
        for parameter in buffer.parameters:
            if (twin := twins[id(parameter)]) in part.state:
                state[parameter] = part.state[twin]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
