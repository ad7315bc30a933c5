"""`laconic shrink` and `laconic inspect`: a model to a small file, and what is in such a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress as Bar
from torch import Tensor

from laconic.cli.shared import Json, count_option, echo_json, echo_table
from laconic.errors import BadInput, MissingExtra, UnknownName, near
from laconic.quantities import parse_nbytes
from laconic.shrinking import file
from laconic.shrinking.door import encode_exactly, shrink_state
from laconic.shrinking.door import shrink as shrink_model
from laconic.shrinking.plan import Plan
from laconic.shrinking.report import HEADINGS, Report, report
from laconic.shrinking.training import Progress, TaskTraining
from laconic.storage.memo import Memo
from laconic.workloads import Task, get, names

SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")  # of files of weights


def shrink(
    model: Annotated[str, typer.Argument(help="model.pt, model.safetensors, or the name of a workload to train.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .lac file.")],
    density: Annotated[float | None, typer.Option(help="Share of weights to keep; default: searched, or all.")] = None,
    bits: Annotated[int | None, typer.Option(help="Bits per shared value; default: searched, or 6.")] = None,
    budget: Annotated[float, count_option("How much a workload's error may rise: 0.001 is 0.1 points.", least=0)] = 0.0,
    share: Annotated[str, typer.Option(help="kmeans, uniform, ternary, binary; none leaves weights alone.")] = "kmeans",
    bit_price: Annotated[float, typer.Option(help="Above 0: trade accuracy of values for fewer bits.")] = 0.0,
    scope: Annotated[str, typer.Option(help="Distribute a density over layers: lamp, global, layer.")] = "lamp",
    structured: Annotated[bool, typer.Option("--structured", help="Prune whole rows, such as filters.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of pruning and retraining a workload.")] = 4,
    epochs: Annotated[int | None, count_option("Epochs of each (re)training; default: the workload's.")] = None,
    seed: Annotated[int, count_option("Seed of a workload.", least=0)] = 0,
    key: Annotated[str | None, typer.Option(help="Entry of a checkpoint that holds the state_dict.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep intermediate results here, to resume from.")] = None,
    json: Json = False,
) -> None:
    """Prune, quantize and encode a model: a weight file without retraining, or a workload with it."""
    plan = Plan(density, bits, share, scope, structured, rounds, bit_price=bit_price)
    if output.is_dir() or any(parent.is_file() for parent in output.parents):
        raise BadInput(f"{output} cannot be written: it is a folder, or within a file")
    path = Path(model)
    if path.suffix in SUFFIXES:
        if budget or epochs or folder:
            text = f"{path} holds weights alone, which are neither trained nor judged"
            raise BadInput(f"{text}: --budget, --epochs and --folder are for workloads")
        if output.resolve() == path.resolve():
            raise BadInput(f"{path} is the model itself; name another file to write")
        state = _state(path, key)
        is_exact = share == "none" and density is None
        file.write(output, encode_exactly(state) if is_exact else shrink_state(state, plan))
        if not is_exact:
            typer.echo("shrunk without training or a test: compare the model's accuracy before you ship it", err=True)
    else:
        if set(model) & set("./") and not set(model) & set("(:"):  # a path rather than the spec of a workload
            known = f"a file of weights ({', '.join(SUFFIXES)}) nor a workload{near(model, names())}"
            raise BadInput(f"{path} is neither {known}")
        workload = get(model)
        if workload.objective.higher_is_better and budget >= 1:
            raise BadInput(f"--budget {budget:g} allows any error: 0.01 is a point of {workload.objective.metric}")
        task = workload.prepare(seed)
        with _resumable(folder), _progress() as say:
            say("training", 0.0)
            memory = Memo(folder, f"{model}, seed {seed}, {epochs} epochs", required=True)
            task.model.load_state_dict(memory.recall("trained", partial(_trained, task, epochs)))
            train: Any = TaskTraining(task, epochs) if epochs else task
            small = shrink_model(task.model, train, None, budget, plan=plan, folder=folder, progress=say)
        small.save(output)
    _show(report(file.Reader(output, file.UNLIMITED)), json)


def inspect(
    path: Annotated[Path, typer.Argument(help="A .lac file.")],
    memory: Annotated[
        str | None, typer.Option(help="Refuse a file whose tensors take more, such as 8GB; default: 4,096 × the file.")
    ] = None,
    json: Json = False,
) -> None:
    """List the layers of a .lac file with their sizes."""
    _show(report(file.Reader(path, None if memory is None else parse_nbytes(memory, "memory"))), json)


@contextmanager
def _resumable(folder: Path | None) -> Iterator[None]:
    """Say after Ctrl-C what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"; the same command goes on from what {folder} keeps" if folder else "; with --folder it could go on"
        typer.echo(f"stopped, nothing was written{kept}", err=True)
        raise typer.Exit(130) from None


def _state(path: Path, key: str | None) -> dict[str, Tensor]:
    """The tensors of a file of weights, or of an entry of a checkpoint; nothing in it is run."""
    try:
        path.open("rb").close()
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            if key is not None:
                raise BadInput(f"{path} holds tensors by name: --key is for checkpoints of torch.save")
            return dict(load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise MissingExtra("safetensors", "shrink") from error
    except BadInput:
        raise
    except Exception as error:  # pickle's and safetensors' own errors share no base; torch advises to run what is there
        if isinstance(error, OSError) and error.filename is not None:
            raise BadInput(f"{path} cannot be read: {error.strerror}") from error
        if path.suffix == ".safetensors":
            raise BadInput(f"{path} is damaged, or no file of safetensors") from error
        raise BadInput(
            f"{path} holds more than tensors, or is damaged: write it by torch.save(model.state_dict(), …)"
        ) from error
    inner = [name for name, value in found.items() if _is_state(value)] if isinstance(found, dict) else []
    if key is not None:
        if key not in inner:
            raise UnknownName(f"state_dict in {path}", key, map(str, inner))
        return dict(found[key])
    if not _is_state(found):
        held = "; choose one in it: --key " + ", --key ".join(map(str, inner)) if inner else ""
        raise BadInput(f"{path} is not a state_dict, tensors by name{held or '; save model.state_dict()'}")
    return dict(found)


def _is_state(found: object) -> bool:
    """Whether something is tensors by name."""
    return isinstance(found, dict) and bool(found) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()
    )  # fmt: skip


def _trained(task: Task, epochs: int | None) -> dict[str, Tensor]:
    """The state of a workload's model after training."""
    TaskTraining(task, epochs or task.workload.epochs, rate=1.0)(task.model)
    return dict(task.model.state_dict())


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar under its lines on a terminal, the lines alone elsewhere; both on standard error."""
    if not sys.stderr.isatty():
        yield lambda line, share: typer.echo(line, err=True)
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("shrinking", total=1.0)

        def say(line: str, share: float) -> None:
            bar.console.print(line, highlight=False, markup=False)
            bar.update(task, completed=share)

        yield say


def _show(found: Report, json: bool) -> None:
    if json:
        rows = [{**asdict(row), "reduction_factor": row.reduction_factor} for row in found.rows]
        sizes = {"dense_nbytes": found.dense_nbytes, "file_nbytes": found.file_nbytes, "density": found.density}
        return echo_json({**sizes, "reduction_factor": found.reduction_factor, "about": found.about, "tensors": rows})
    echo_table(HEADINGS, found.table())
    if found.errors:
        typer.echo(found.errors)
