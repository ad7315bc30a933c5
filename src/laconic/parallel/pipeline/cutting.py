"""A model as a chain of layers, and the chain cut into stages.

Callers: `build.py`, and `balance.py`, which chooses cuts. The model is traced by torch.fx into the list of what its
forward calls; a cut is a place in this list, and a stage is the part between two cuts. A value that a later stage uses
crosses to each stage that does, so skip connections need no special case. A submodule that torch.fx cannot trace is one
layer.

What cannot be cut: a model that branches on values, such as `if x.sum() > 0`, or loops over its input in its own
forward, not that of a submodule.

Invariant: node order is the order in which one process computes; a stage computes its part in that order. So sums of
gradients are formed in the order of one process too.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from laconic.errors import BadInput

_tracing = threading.Lock()  # torch.fx changes nn.Module itself for the time it traces


class _Tracer(fx.Tracer):
    """Traces through the user's modules; torch's own, and those that cannot be traced, are layers."""

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # whatever a user's forward raises when it is given proxies
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            self.module_stack = stack
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A weight is fetched where it is used, on the stage that uses it."""
        return super().getattr(attr, attr_val, {})


def _trace(model: nn.Module) -> fx.Graph:
    """Trace the calls of the model's forward, in order; arguments keep their defaults."""
    defaults = {
        name: each.default
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.default is not inspect.Parameter.empty
    }
    try:
        with _tracing:
            graph = _Tracer().trace(model, concrete_args=defaults or None)
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        cure = "move what it cannot trace into a submodule, which then is one layer"
        if "co_varnames" in why:  # torch.fx calls a wrapped forward by the arguments of the one inside
            why = "decorators wrap it, as they do in Hugging Face's models"
            cure = "call its layers from a plain forward of your own"
        raise BadInput(
            f"the model cannot be cut into stages, as torch.fx cannot trace its forward: {why}; {cure}"
        ) from error
    for node in reversed(list(graph.nodes)):  # the checks that hold the defaults fast, and what only they use
        kept = {node.target, str(node.target).rsplit("_", 1)[0]} & defaults.keys() if node.op == "placeholder" else ()
        checks = node.op == "call_function" and (node.target is operator.eq or "_assert" in str(node.target))
        if (checks or kept) and not node.users:
            graph.erase_node(node)
    return graph


@dataclass(frozen=True)
class Value:
    """A value that crosses from the stage that makes it to the stages that use it, in order."""

    name: str
    source: int
    targets: tuple[int, ...]

    @property
    def chain(self) -> tuple[int, ...]:
        """Source and targets: its gradient comes back along it, each stage adding its own part, as one process adds."""
        return (self.source, *self.targets)


@dataclass
class Segment:
    """One stage's part of a traced model.

    Attributes:
        module: takes what comes in, as `takes` names it, and returns what goes out, as `gives` does; then, on the last
            stage, the model's output.
        takes: inputs of the model (first stage) and values of earlier stages.
        gives: values that later stages use.
        changed: what it takes and changes in place.
    """

    module: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    changed: frozenset[str] = frozenset()


@dataclass
class Traced:
    """A model's layers in order: every place where it can be cut.

    Attributes:
        layers: (position in the graph, name) of each call of a layer.
    """

    model: nn.Module
    graph: fx.Graph
    nodes: list[fx.Node] = field(init=False)
    layers: list[tuple[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        self.layers = [(at, str(node.target)) for at, node in enumerate(self.nodes) if node.op == "call_module"]

    @classmethod
    def of(cls, model: nn.Module, training: bool) -> Traced:
        """The model as it computes in training or in evaluation. Raises BadInput."""
        flags = [(module, module.training) for module in model.modules()]
        try:
            return cls(model, _trace(model.train(training)))
        finally:
            for module, flag in flags:
                module.training = flag

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return tuple(node.name for node in self.nodes if node.op == "placeholder")

    def positions(self, cuts: Sequence[str]) -> list[int]:
        """Where the layers begin that are named by `cuts`, which must be in the model's order.

        Raises:
            BadInput: no such layer, out of order, or the first.
        """
        found = [next((at for at, name in self._owners() if _inside(name, cut)), None) for cut in cuts]
        first = self.layers[0][0] if self.layers else 0
        for cut, at in zip(cuts, found, strict=True):
            if at is None:
                names = ", ".join(dict.fromkeys(name for _, name in self.layers[:12]))
                raise BadInput(f"the cut '{cut}' names no layer that the model calls; it calls {names}")
            if at <= first:
                raise BadInput(f"the cut '{cut}' begins a stage with the model's first layer and leaves none before it")
        places = [at for at in found if at is not None]
        if places != sorted(set(places)):
            raise BadInput(f"cuts go in the order in which the model calls its layers, got {', '.join(cuts)}")
        return places

    def candidates(self) -> dict[int, str]:
        """Every place where a stage can begin, and the outermost module that begins there."""
        first = self.layers[0][0] if self.layers else 0
        calls = {name for _, called in self.layers for name in _outer(called)}
        begins: dict[str, int] = {}
        for at, name in self._owners():
            begins.setdefault(name, at)
        found: dict[int, str] = {}
        for name, at in begins.items():
            if name in calls and at > first:
                found.setdefault(at, name)
        return dict(sorted(found.items()))

    def _owners(self) -> Iterator[tuple[int, str]]:
        """(position, module) for each node and each module that it is called in, the outermost first."""
        for at, node in enumerate(self.nodes):
            for name, _ in (node.meta.get("nn_module_stack") or {}).values():
                yield at, name
            if node.op == "call_module":
                yield at, str(node.target)

    def values(self, places: Sequence[int]) -> list[Value]:
        """What crosses these cuts, in the order in which it is made."""
        stage_of = self._stages(places)
        found = []
        for node in self.nodes:
            if node.op != "get_attr":
                users = sorted({stage_of[user] for user in node.users} - {stage_of[node]})
                if users:
                    found.append(Value(node.name, stage_of[node], tuple(users)))
        return found

    def _stages(self, places: Sequence[int]) -> dict[fx.Node, int]:
        stages = {node: sum(place <= at for place in places) for at, node in enumerate(self.nodes)}
        return {node: 0 if node.op == "placeholder" else stage for node, stage in stages.items()}

    def segment(self, places: Sequence[int], stage: int) -> Segment:
        """The part of one stage. Raises BadInput where a value is changed in place that another stage uses later."""
        stage_of, values = self._stages(places), self.values(places)
        made = {node.name: node for node in self.nodes}
        takes = list(self.inputs) if stage == 0 else []
        takes += [value.name for value in values if stage in value.targets]
        gives = [value.name for value in values if value.source == stage]
        graph = fx.Graph()
        copies = {made[name]: graph.placeholder(name) for name in takes}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies and node.op == "get_attr":
                copies[node] = graph.node_copy(node)
            return copies[node]

        changed = set()
        for node in self.nodes:
            if stage_of[node] == stage and node.op not in ("placeholder", "get_attr", "output"):
                changed |= {arg.name for arg in node.all_input_nodes if self._changes(node)}
                copies[node] = graph.node_copy(node, copied)
        for value in values:
            if value.name in changed and stage in value.targets[:-1]:
                raise BadInput(
                    f"'{value.name}' is changed in place on stage {stage}, and stage {value.targets[-1]} uses it after "
                    "that; cut elsewhere, or let the layer not work in place"
                )
        out: tuple[Any, ...] = tuple(copied(made[name]) for name in gives)
        if stage == len(places):
            out = (*out, fx.map_arg(self.nodes[-1].args[0], copied))
        graph.output(out)
        module = fx.GraphModule(self.model, graph)
        return Segment(module, tuple(takes), tuple(gives), frozenset(changed & set(takes)))

    def _changes(self, node: fx.Node) -> bool:
        """Whether a node changes its argument in place."""
        if node.op == "call_module":
            return bool(getattr(self.model.get_submodule(str(node.target)), "inplace", False))
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return bool(node.kwargs.get("inplace")) or name in _IN_PLACE or (name[-1:] == "_" and name[-2:] != "__")


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor"}  # of the operator module


def _outer(name: str) -> Iterator[str]:
    """A module's name and those of the modules around it: a.b.c → a, a.b, a.b.c."""
    parts = name.split(".")
    return (".".join(parts[: depth + 1]) for depth in range(len(parts)))


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")

