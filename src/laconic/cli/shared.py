"""Shared by commands: options, JSON output, tables that are tab-separated lines when piped."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from laconic.errors import BadInput

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Ranks = Annotated[int, typer.Option("-n", "--ranks", help="Local ranks; ignored under torchrun or mpiexec.")]
Engine = Annotated[str | None, typer.Option(help="gloo, mpi or zmq.")]


def count_option(what: str, *names: str, least: int = 1) -> Any:
    """An option from `least` on, which `what` explains in its help: a count, or with 0 a seed; repeated, each value."""
    return _checked(what, names, lambda value: value >= least, f"at least {least}")


def amount_option(what: str, *names: str, most: float = math.inf) -> Any:
    """An option that measures something: above 0, finite, and no more than `most`."""
    limit = "finite" if math.isinf(most) else f"at most {most:g}"
    return _checked(what, names, lambda value: 0 < value <= most and math.isfinite(value), f"above 0 and {limit}")


def _checked(what: str, names: Sequence[str], holds: Callable[[float], bool], rule: str) -> Any:
    def check(option: typer.CallbackParam, given: Any) -> Any:
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not holds(value):
                raise BadInput(f"{option.opts[-1]} must be {rule}, got {value}")
        return given

    return typer.Option(*names, help=what, callback=check)


def echo_json(record: Any) -> None:
    """Print a record as JSON."""
    typer.echo(json.dumps(record, indent=2, ensure_ascii=False))


def echo_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = (), named: bool = True
) -> None:
    """Print a table.

    Args:
        left: columns aligned to the left, besides the first.
        named: print the headings when piped, too.
    """
    if not sys.stdout.isatty():
        for row in [headings, *rows] if named else rows:
            typer.echo("\t".join(row))
        return
    table = Table(box=None, header_style="bold")
    for position, heading in enumerate(headings):
        is_left = position == 0 or heading in left
        table.add_column(heading, justify="left" if is_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup: a name from a file may have brackets
    Console().print(table)


FOLLOWING = "following the model on shapes"


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error when it is a terminal; nothing otherwise."""
    disabled = quiet or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=disabled) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
