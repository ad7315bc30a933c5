"""List the benchmarks, or run one: `python -m benchmarks [NAME [OPTIONS]]`.

A benchmark is a file with a function `main` in one of the folders here; its name is the file's, and the first line of
its docstring describes it. Options are `main`'s parameters, as in the commands of `laconic`; a `main` without any, or
with `arguments` alone, reads `sys.argv`. Bad input ends in exit code 2 and one sentence.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path

import typer

from laconic.errors import LaconicError, UnknownName

HERE = Path(__file__).parent


def benchmarks() -> dict[str, Path]:
    """The files of all benchmarks by name, in the order of their folders."""
    files = [path for path in sorted(HERE.glob("*/*.py")) if "\ndef main(" in path.read_text(encoding="utf-8")]
    return {path.stem.replace("_", "-"): path for path in files}


def main(arguments: list[str] | None = None) -> None:
    """Run what the first word names, with the other words as its options."""
    name, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        return _list()
    try:
        _run(name, words)
    except LaconicError as error:
        typer.echo(f"benchmarks: {error}", err=True)
        sys.exit(2)


def module_name(path: Path) -> str:
    """The dotted name of a benchmark's module."""
    return ".".join(("benchmarks", *path.relative_to(HERE).with_suffix("").parts))


def _run(name: str, words: list[str]) -> None:
    found = benchmarks()
    if name not in found:
        raise UnknownName("benchmark", name, found)
    function = importlib.import_module(module_name(found[name])).main
    program = f"python -m benchmarks {name}"
    if set(inspect.signature(function).parameters) - {"arguments"}:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command()(function)
        app(args=words, prog_name=program)
    sys.argv = [program, *words]
    sys.exit(function())


def _list() -> None:
    """Print every benchmark with its first line, by topic."""
    topic = ""
    found = benchmarks()
    width = max(map(len, found))
    for name, path in found.items():
        if path.parent.name != topic:
            topic = path.parent.name
            typer.echo(f"{topic}: {_first_line(path.parent / '__init__.py')}")
        typer.echo(f"  {name:{width}}  {_first_line(path)}")


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
