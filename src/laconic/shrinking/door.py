"""`laconic.shrink` and `laconic.load_shrunk`: a model to a small file, and back.

Callers: users, the command line, the benchmark.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from laconic.errors import BadInput, BudgetMissed
from laconic.shrinking import file, retrain, sparse_layers
from laconic.shrinking.parts import Part, Whole
from laconic.shrinking.plan import Plan
from laconic.shrinking.report import Report, report
from laconic.shrinking.search import Search, model_of
from laconic.shrinking.training import Evaluate, Progress, Train, TrainingSteps, resolve
from laconic.workloads import Task, Workload


@dataclass(frozen=True, eq=False, repr=False)
class Shrunk:
    """A shrunk model; printed, it is its report.

    Attributes:
        model: with the very weights that the file gives back.
        parts: what the file holds, by name.
        plan: what was done.
        dense_error: of the model before, where it was judged.
        error: of the model now.
    """

    model: nn.Module
    parts: Mapping[str, Part]
    plan: Plan
    dense_error: float | None = None
    error: float | None = None
    _about: dict[str, Any] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        """The file's notes for readers."""
        errors = {"dense_error": self.dense_error, "error": self.error}
        return {**self._about, **{key: value for key, value in errors.items() if value is not None}}

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the file, whole or not at all; returns its bytes."""
        return file.write(path, self.parts, self.about())

    def report(self) -> Report:
        """Layer by layer, as the file will be."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder) / "model.lac")
            return report(file.Reader(Path(folder) / "model.lac", file.UNLIMITED))

    def __str__(self) -> str:
        return str(self.report())


def shrink(
    model: nn.Module,
    train: Train | Workload | Task | str | None = None,
    evaluate: Evaluate | None = None,
    budget: float = 0.0,
    *,
    plan: Plan | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Shrunk:
    """Prune a model, let weights share values, and code what is left; the given model is not changed.

    Args:
        model: trained.
        train: a function that trains a model for a while with an optimiser of its own over `model.parameters()`, or a
            workload. It is called after every round of pruning and once to tune the shared values. Under
            `laconic.distribute` every worker calls `shrink` alike. Without it, values are shared and coded, not pruned.
        evaluate: a model's error, lower being better; a workload brings its own. The model is in evaluation mode.
        budget: how much the error may rise, in the unit of `evaluate`: 0.001 is a tenth of a point.
        plan: what is to be done; what it leaves open is searched for under the budget.
        folder: keeps what was trained and judged, so that it goes on there when it is interrupted. Several workers
            share it, or have none.
        progress: is given a line and the share that is done, from 0 to 1, after every step.

    Returns:
        The smallest of what was tried within the budget.

    Raises:
        BudgetMissed: nothing is within the budget; `nearest` is what came nearest.

    >>> import laconic, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> small = laconic.shrink(model, plan=laconic.shrinking.Plan(bits=4))
    >>> small.report().reduction_factor > 5
    True

    >>> small = laconic.shrink(model)  # without training: weights share values and are coded
    >>> small.report().reduction_factor > 3
    True
    """
    if not budget >= 0:
        raise BadInput(f"budget is how much the error may rise, 0 or more, got {budget}")
    _check_model(model)
    trainer, judge = resolve(train, evaluate)
    plan = plan or Plan()
    plan.check(model)
    before = judge(model) if judge else None
    if before is not None and not math.isfinite(before):
        raise BadInput(f"the error of the model as it is given is {before}; there is nothing to compare with")
    if judge is not None and before is not None:
        search = Search(trainer, judge, before + budget, Path(folder) if folder else None, progress)
        best = search.best(model, plan, before)
        small, parts, plan, after = model_of(model, best.parts), best.parts, best.plan, best.error
    else:
        small = retrain.copy_of(model)
        trainer = TrainingSteps(progress, plan.rounds + 1).reporting(trainer)
        parts, after = plan.share_values(small, plan.prune(small, trainer), trainer), None
        small.eval()
    shrunk = Shrunk(small, parts, plan, before, after)
    if before is not None and after is not None and after > before + budget:
        text = f"the error rose by {after - before:.4g}, more than the budget of {budget:.4g}"
        raise BudgetMissed(f"{text}; give a larger budget, density or number of bits, or train for longer", shrunk)
    return shrunk


def _check_model(model: object) -> None:
    """Raise BadInput unless all of a model can be copied, computed with here and written to a file."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"a model is a torch.nn.Module, got {type(model).__name__}")
    for name, tensor in model.state_dict().items():
        file.check(name, tensor)
        if tensor.device.type != "cpu":
            raise BadInput(f"a model is shrunk on the CPU, and '{name}' is on {tensor.device}: model.cpu() moves it")


def shrink_state(state: Mapping[str, Tensor], plan: Plan) -> dict[str, Part]:
    """Prune, share and code a state_dict whose model is not known: matrices by the plan, all else without loss."""
    holder = nn.ParameterDict({str(i): nn.Parameter(t, requires_grad=False) for i, t in enumerate(state.values())
                               if t.dim() > 1 and t.dtype == torch.float32})  # fmt: skip
    for name, tensor in state.items():
        file.check(name, tensor)
    plan.check_dtypes(state)
    names = {str(i): name for i, name in enumerate(state)}
    if isinstance(plan.density, Mapping) or isinstance(plan.bits, Mapping):
        raise BadInput("a file of weights takes one density and one number of bits")
    small = retrain.copy_of(holder)
    parts = plan.share_values(small, plan.prune(small, None), None)
    found = {names[key]: part for key, part in parts.items()}
    return {name: found.get(name, Whole(tensor)) for name, tensor in state.items()}


def encode_exactly(state: Mapping[str, Tensor]) -> dict[str, Part]:
    """Any state_dict without loss, for `file.write`."""
    return {name: Whole(tensor) for name, tensor in state.items()}


def load_shrunk(
    path: str | os.PathLike[str],
    into: nn.Module | None = None,
    sparse: Literal["auto", "always", "never"] = "auto",
    *,
    batch: int = 1,
    most_nbytes: int | None = None,
) -> Any:
    """The tensors of a `.lac` file by name, or the model with them.

    Args:
        into: a model with the same names and shapes, which is changed and returned. Made under
            `torch.device("meta")` it takes no memory before; then layers that will be sparse never become dense.
        sparse: "auto" lets fully connected layers of few weights compute with those alone where that is measured to
            be quicker; "always" does so unmeasured; "never" leaves dense weights in plain torch layers.
        batch: samples at a time, for the measurement.
        most_nbytes: refuse a file whose tensors take more memory. None: 4,096 times the file's bytes, or 1 GiB, which
            only models of almost nothing but zeros exceed.

    Raises:
        PayloadError: the file is cut off, changed, of another kind or a newer version, or takes too much memory.
        BadInput: the names or shapes are not the model's; the differences are listed.

    >>> import tempfile, laconic
    >>> model = nn.Linear(64, 10)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = laconic.shrink(model).save(f"{folder}/model.lac")
    ...     sorted(load_shrunk(f"{folder}/model.lac"))
    ['bias', 'weight']
    """
    if sparse not in ("auto", "always", "never"):
        raise BadInput(f"sparse is 'auto', 'always' or 'never', got {sparse!r}")
    if batch < 1:
        raise BadInput(f"batch is 1 sample or more, got {batch}")
    if most_nbytes is not None and most_nbytes < 1:
        raise BadInput(f"most_nbytes is a number of bytes, 1 or more, got {most_nbytes}")
    reader = file.Reader(path, most_nbytes)
    if into is None:
        return {name: reader.tensor(name) for name in reader.entries}
    if not isinstance(into, nn.Module):
        raise BadInput(f"into is a torch.nn.Module, got {type(into).__name__}")
    _check_fit(path, reader, into.state_dict())
    few = {name for name, entry in reader.entries.items() if entry.coding == "shared"} if sparse != "never" else set()
    first = {other: name for name, others in retrain.tied(into).items() for other in others}
    late = sparse_layers.on_meta(into, few - first.keys() - set(first.values()))
    with torch.no_grad():
        for name, tensor in into.state_dict().items():
            if tensor.is_meta and name in first:
                retrain.tie(into, name, first[name])
            elif name not in late:
                _fill(into, name, tensor, reader)
    sparse_layers.make_sparse(into, few, batch=batch, measured=sparse == "auto", reader=reader)
    return into


def _fill(model: nn.Module, name: str, tensor: Tensor, reader: file.Reader) -> None:
    """Give one of a model's tensors its values, in place; on the device "meta" it has none, and is replaced."""
    if tensor.is_meta:
        owner, attribute = retrain.owner(model, name)
        owner.load_state_dict({attribute: reader.tensor(name).to(tensor.dtype)}, strict=False, assign=True)
        return
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    if is_plain and str(tensor.dtype) == f"torch.{reader.entries[name].dtype}":
        reader.tensor(name, out=tensor)
    else:
        tensor.copy_(reader.tensor(name))


def _check_fit(path: str | os.PathLike[str], reader: file.Reader, state: Mapping[str, Tensor]) -> None:
    """Raise BadInput with every difference between a file and a model."""
    there = {name: entry.shape for name, entry in reader.entries.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if there == wanted:
        return
    lines = [f"only in the file: {name} {there[name]}" for name in there.keys() - wanted.keys()]
    lines += [f"only in the model: {name} {wanted[name]}" for name in wanted.keys() - there.keys()]
    lines += [f"{name} is {there[name]} in the file and {wanted[name]} in the model"
              for name in there.keys() & wanted.keys() if there[name] != wanted[name]]  # fmt: skip
    raise BadInput(f"{os.fspath(path)} does not fit the model: {'; '.join(sorted(lines))}")
