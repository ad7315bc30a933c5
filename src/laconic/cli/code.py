"""`laconic code graph`: programs as flow graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.shared import Json, echo_json
from laconic.comprehension import graph as graphs
from laconic.comprehension.drawing import draw
from laconic.storage import files

Program = Annotated[Path, typer.Argument(help="C, C++ or OpenCL source, .ll or .bc.")]


def graph(
    program: Program,
    output: Annotated[Path | None, typer.Option("-o", help="The SVG. Default: the program's name with .svg.")] = None,
    json: Json = False,
) -> None:
    """Draw the flow graph of a program as SVG: data flow, control flow and calls between its statements."""
    found = graphs.read(program)
    path = files.replace(output or program.with_suffix(".svg"), draw(found, program.name))
    kinds = {name: int((found.edges[:, 2] == kind).sum()) for kind, name in enumerate(graphs.KINDS)}
    functions = len({each.function for each in found.statements if each.function})
    if json:
        return echo_json(
            {
                "program": str(program), "svg": str(path), "functions": functions, "statements": list(found.abstracted),
                "edges": [[source, target, graphs.KINDS[kind]] for source, target, kind in found.edges.tolist()],
            }
        )  # fmt: skip
    edges = ", ".join(f"{count:,} of {name}" for name, count in kinds.items())
    typer.echo(f"{path}: {functions} functions, {len(found):,} statements; edges: {edges}")
