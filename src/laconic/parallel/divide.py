"""`laconic.divide(model, plan, codec=…)`: the entry point to all ways to divide a model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from laconic.errors import BadInput
from laconic.exchange.likeness import check_alike
from laconic.parallel.boundary import Boundary, Spec
from laconic.parallel.forms.data import Data
from laconic.parallel.forms.norm import Norm
from laconic.parallel.forms.stages import Stages
from laconic.parallel.forms.trick import Trick
from laconic.parallel.layer import Context, Layer, scaled, share_gradients
from laconic.parallel.pipeline import Pipeline, build
from laconic.parallel.plan import DividedForm, Form, Plan, PlannedDivision, SplitForm
from laconic.parallel.turns import PassTurns
from laconic.transports.world import World, current

ELEMENTWISE = (
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip
CONTEXT = "laconic_division"  # the attribute of a divided model that holds its context


@overload
def divide(
    model: nn.Module,
    plan: Stages,
    *,
    codec: Spec | tuple[Spec, Spec] | Boundary | None = None,
    world: World | None = None,
    sample: Sequence[Tensor] | None = None,
) -> Pipeline: ...
@overload
def divide(
    model: nn.Module,
    plan: Plan | Form | Mapping[str, Form | str] | str | PlannedDivision,
    *,
    codec: Spec | tuple[Spec, Spec] | Boundary | None = None,
    world: World | None = None,
    sample: Sequence[Tensor] | None = None,
) -> nn.Module: ...
def divide(
    model: nn.Module,
    plan: Plan | Form | Mapping[str, Form | str] | str | PlannedDivision,
    *,
    codec: Spec | tuple[Spec, Spec] | Boundary | None = None,
    world: World | None = None,
    sample: Sequence[Tensor] | None = None,
) -> nn.Module:
    """Divide `model` over the ranks of a world, in place; all ranks call it with the same model and plan.

    Afterwards backward gives each rank the gradients of what it holds, equal to those of the whole model on the whole
    batch: make the optimiser after this. Where the plan has `Data`, ranks bring rows of their own and get their rows of
    the output, and the loss is the mean over all rows; else all ranks bring the same batch.

    Args:
        model: the whole model, the same on all ranks, bit for bit; its layers are replaced by this rank's parts.
        plan: {pattern: form}, a form of the whole model, a spec, `Plan.to_json`'s text, or what `laconic.plan` chose.
        codec: of activations and of their gradients, a pair or one for both; exact when None.
        world: the ranks that share the model; the default world when None.
        sample: inputs of a micro-batch, on which `Stages("auto")` measures the layers.

    Returns:
        The model; with `Stages`, a `Pipeline`: this rank's stage.

    Raises:
        BadInput: a pattern matches nothing, a layer cannot be divided so, a codec's payloads vary in size.
        Mismatch: the ranks brought different models, weights or plans.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> divide(model, "0=dense(output); 2=dense(input)", codec="dynamic8")(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    boundary, asked, here = Boundary.of(codec), Plan.of(plan), world or current()
    if isinstance(asked.alone, Stages):
        return build(model, asked.alone, boundary, here, sample)
    if hasattr(model, CONTEXT):
        raise BadInput("this model is divided already")
    layers = asked.layers(model)
    _refuse_tied(model, layers)
    context = Context(here, boundary, _shares(asked, here.world_size))
    if not context.silent:
        check_alike("divide", _terms(model, asked, boundary), here.transport)
    lies = _layouts(model, layers, context.base)
    _enter_turns(layers, lies, context)
    made = {name: form.make(name, module, context, *lies[name])
            for name, module, form in layers if isinstance(form, DividedForm)}  # fmt: skip
    for name, module, form in layers:
        if isinstance(form, Trick):
            module.forward = PassTurns(module.forward, context.cut(name), context, form.scheme)
    for name, layer in made.items():
        owner, _, own = name.rpartition(".")
        if not name:
            raise BadInput("the model is a single layer; put it into nn.Sequential to divide it")
        setattr(model.get_submodule(owner), own, layer)
    _ask_layers(model)
    if context.shares is not None:
        _share_the_rest(model, asked, context)
    setattr(model, CONTEXT, context)
    return model


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Send activations without the codec inside the block, as for an evaluation; all ranks must do so.

    Raises:
        BadInput: the model is not divided.
    """
    if isinstance(model, Pipeline):
        with model.exact():
            yield
        return
    context: Context | None = getattr(model, CONTEXT, None)
    if context is None:
        raise BadInput("this model is not divided")
    before = [(cut, cut.boundary) for cut in context.coded]
    for cut, _ in before:
        cut.boundary = Boundary.of(None)
    try:
        yield
    finally:
        for cut, boundary in before:
            cut.boundary = boundary


def _ask_layers(model: nn.Module) -> None:
    """Make torch's own transformer call its dense layers in evaluation, too, instead of reading their weights."""
    for module in model.modules():
        if any(isinstance(each, Layer) for each in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0  # the fast path is for 1 and 2
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _shares(plan: Plan, ranks: int) -> tuple[int, ...] | None:
    found = {form.shares or (1,) * ranks for _, form in plan.entries if isinstance(form, Data)}
    if len(found) > 1:
        raise BadInput("the layers of a model see the same rows: give all Data the same shares")
    shares = next(iter(found), None)
    if shares is not None and len(shares) != ranks:
        raise BadInput(f"shares are one a rank: {len(shares)} for {ranks} ranks")
    return shares


def _terms(model: nn.Module, plan: Plan, boundary: Boundary) -> list[tuple[str, str]]:
    """List the terms that ranks must share: the plan, the codecs, and the weights to the bit."""
    terms = [("plan", str(plan)), ("codec", str(boundary))]
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().new_empty(0) if tensor.is_meta else tensor.detach().cpu().contiguous().view(-1)
        code = 0 if tensor.is_meta else zlib.crc32(flat.view(torch.uint8).numpy())
        terms.append((f"'{name}'", f"{tuple(tensor.shape)} with checksum {code:08x}"))
    return terms


def _refuse_tied(model: nn.Module, layers: Sequence[tuple[str, nn.Module, Form]]) -> None:
    """Refuse to divide a parameter that another module shares: its parts would be trained apart from the whole."""
    holders: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(key)
    for name, module, form in layers:
        for own, parameter in module.named_parameters(recurse=False) if isinstance(form, DividedForm) else ():
            if len(holders[id(parameter)]) > 1:
                key = f"{name}.{own}" if name else own
                other = next(each for each in holders[id(parameter)] if each != key)
                raise BadInput(f"'{key}' is '{other}' too, and cannot be divided; leave it whole, or give each its own")


def _layouts(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module, Form]], base: str
) -> dict[str, tuple[str, str]]:
    """(takes, gives) of each layer: as its form says; parts between neighbours that fit; else as the model's input."""
    lies: dict[str, list[str]] = {}
    last: tuple[str, DividedForm] | None = None
    for name, _, form in layers:
        if not isinstance(form, DividedForm):
            continue
        takes, gives = getattr(form, "takes", None), getattr(form, "gives", None)
        lies[name] = [takes or base, gives or base]
        if form.part == "any":
            continue
        free = last is not None and takes is None and getattr(last[1], "gives", None) is None
        if last is not None and free and _fits(model, last, name, form, layers):
            lies[last[0]][1] = lies[name][0] = form.part
        last = (name, form)
    _check_norms(layers, lies, base)
    return {name: (takes, gives) for name, (takes, gives) in lies.items()}


def _fits(
    model: nn.Module,
    last: tuple[str, DividedForm],
    name: str,
    form: DividedForm,
    layers: Sequence[tuple[str, Any, Form]],
) -> bool:
    """Whether a layer can take the parts of the one before: both in one Sequential, only such layers between them."""
    (before, opener), owner = last, name.rpartition(".")[0]
    home = model.get_submodule(owner)
    if not opener.opens or not form.closes or opener.part != form.part:
        return False
    if before.rpartition(".")[0] != owner or not isinstance(home, nn.Sequential):
        return False
    if isinstance(form, SplitForm):
        made, taken = (model.get_parameter(f"{each}.weight").shape for each in (before, name))
        same = made[0] == taken[1] and getattr(opener, "blocks", 1) == 1 and opener.pieces == form.pieces
    else:
        same = opener.pieces == form.pieces
    return same and _between(home, before, name, layers)


def _between(home: nn.Module, before: str, after: str, layers: Sequence[tuple[str, Any, Form]]) -> bool:
    """Whether only elementwise layers, and norms over all ranks, lie between two children of a Sequential."""
    names, norms = [name for name, _ in home.named_children()], {name for name, _, f in layers if isinstance(f, Norm)}
    owner = before.rpartition(".")[0]
    first, last = names.index(before.rpartition(".")[2]), names.index(after.rpartition(".")[2])
    prefix = f"{owner}." if owner else ""
    return all(
        isinstance(home.get_submodule(each), ELEMENTWISE) or prefix + each in norms for each in names[first + 1 : last]
    )


def _check_norms(layers: Sequence[tuple[str, nn.Module, Form]], lies: dict[str, list[str]], base: str) -> None:
    """Refuse shared statistics if all ranks see the same rows."""
    strips = any("area" in pair for pair in lies.values())
    for name, _, form in layers:
        if isinstance(form, Norm) and base == "whole" and not strips:
            raise BadInput(f"all ranks bring the same rows to {name}; norm is for plans with Data, or between strips")


def _enter_turns(
    layers: Sequence[tuple[str, nn.Module, Form]], lies: dict[str, tuple[str, str]], context: Context
) -> None:
    """Make the first layer of a module in turns take the rows that the turn has gathered."""
    for name, module, form in layers:
        if not isinstance(form, Trick):
            continue
        if context.shares is None:
            raise BadInput(f"'{name}' takes rows in turns: give the layers before it Data()")
        inside = [each for each in lies if each.startswith(f"{name}.")]
        first = next((f for each, _, f in layers if inside and each == inside[0]), None)
        early = [each for each, inner in module.named_modules() if inner._parameters and f"{name}.{each}" not in lies]
        if not isinstance(first, SplitForm) or first.split != "output" or early:
            raise BadInput(f"in turns, all layers of '{name}' are divided, the first by dense(output)")
        lies[inside[0]] = ("use", lies[inside[0]][1])


def _share_the_rest(model: nn.Module, plan: Plan, context: Context) -> None:
    """Average the gradients of undivided layers over the ranks, weighted by their rows."""
    assert context.shares is not None
    data = next(form for _, form in plan.entries if isinstance(form, Data))
    inside = {id(p) for layer in model.modules() if isinstance(layer, Layer) for p in layer.parameters()}
    cut = context.cut("data", boundary=Boundary.of((data.codec, data.codec)))
    share_gradients([p for p in model.parameters() if id(p) not in inside], cut)
    ranks, rank = context.world.world_size, context.world.rank

    def weigh(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        counts = context.turn or context.shares or (1,)
        return scaled(output, ranks * counts[rank] / sum(counts))

    if data.ask:
        model.register_forward_pre_hook(_Asking(context), with_kwargs=True)
    if data.ask or len(set(context.shares)) > 1:
        model.register_forward_hook(weigh)


class _Asking:
    """A hook before a forward: exchange how many rows each rank brings."""

    def __init__(self, context: Context) -> None:
        self.context, self.cut = context, context.exact("rows")

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = tree_leaves((inputs, named))
        if not given:
            return  # a model without inputs has no rows to weigh
        first = next((each for each in given if isinstance(each, Tensor) and each.dim()), None)
        if first is None:
            raise BadInput("data(ask=true) counts rows by the first tensor that the model is given, and there is none")
        size, own = self.cut.size, torch.tensor([len(first)], device=first.device)
        came = self.cut.swap("forward", dict.fromkeys(range(size), own), dict.fromkeys(range(size), (1,)), size)
        self.context.turn = tuple(len(first) if each.is_meta else int(each) for each in came.values())
