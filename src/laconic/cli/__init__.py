"""The command line: thin commands, no logic. `laconic --help` lists them.

A command's module is imported only when it is called, so that `laconic simulate` does not wait for torch; the list of
commands reads their first lines from the source. Bad input ends in exit code 2 and one sentence.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from laconic import __version__
from laconic.cli import catalogue
from laconic.cli.groups import CommandGroup, WholeSentences, added
from laconic.errors import LaconicError, UnknownName

COMMANDS: Mapping[str, str | CommandGroup] = {
    "codecs": "laconic.cli.codecs:codecs",
    "cost": "laconic.cli.cost:cost",
    "inspect": "laconic.cli.shrink:inspect",
    "join": "laconic.cli.join:join",
    "key": "laconic.cli.key:key",
    "meet": "laconic.cli.meet:meet",
    "schedule": "laconic.cli.schedule:schedule",
    "shrink": "laconic.cli.shrink:shrink",
    "simulate": "laconic.cli.schedule:simulate",
    "status": "laconic.cli.status:status",
    "warm": "laconic.cli.warm:warm",
    "watch": "laconic.cli.watch:watch",
}
HELP = "Cut communication time in PyTorch training by compressing and overlapping gradients."
_LONG = re.compile(r"--[a-z][a-z0-9-]*")
# What follows the script is the script's own.
SETTINGS = {name: {"allow_interspersed_args": False} for name in ("join", "run")}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `laconic` command."""
    words = sys.argv[1:] if arguments is None else arguments
    # Emulated hosts have no name service, of which torch complains at every connection; read when torch is loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A warning is one line, without the place in the code that gave it; some are given while a command is imported.
    warnings.formatwarning = lambda message, *_args, **_options: f"laconic: {message}\n"
    try:
        _group("laconic", HELP, _table(words), words)(args=words, prog_name="laconic")
    except LaconicError as error:
        typer.echo(f"laconic: {error}", err=True)
        if isinstance(error, UnknownName) and "laconic.workloads" in sys.modules:
            catalogue.catalogue()  # so that the next one is refused at once
        sys.exit(2)
    except KeyboardInterrupt:  # also while a command is still being imported
        sys.exit(130)


def _table(words: list[str]) -> Mapping[str, str | CommandGroup]:
    """Our commands; with those of other packages where they may be asked for."""
    if words and words[0] in COMMANDS:
        return COMMANDS
    found: dict[str, str | CommandGroup] = {}
    for table in added(words[0] if words else None):
        found.update(table.commands)
        if words and words[0] in table.commands:
            table.check(words)
    return dict(sorted({**found, **COMMANDS}.items()))


def _group(name: str, text: str, table: Mapping[str, str | CommandGroup], words: list[str]) -> typer.Typer:
    """The command of `table` that `words` name, or what the list says of all of them."""
    group = typer.Typer(name=name, cls=WholeSentences, help=text, add_completion=False, no_args_is_help=True,
                        rich_markup_mode=None, pretty_exceptions_enable=False)  # fmt: skip
    group.callback()(_laconic if name == "laconic" else _nothing)
    if words and not words[0].startswith("-") and words[0] not in table:
        raise UnknownName("command", words[0], table)
    called = words[:1] if words and words[0] in table else None
    for command in called or table:
        entry = table[command]
        if isinstance(entry, str):
            if called and command not in SETTINGS:
                _check_options(entry, words[1:])
            function = _function(entry) if called else _listed(entry)
            group.command(command, context_settings=SETTINGS.get(command))(function)
        else:
            group.add_typer(_group(command, entry.help, entry.commands, words[1:] if called else []), name=command)
    return group


def _function(entry: str) -> Callable[..., None]:
    module, name = entry.split(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _listed(entry: str) -> Callable[..., None]:
    """A stand-in with the command's description, for lists: importing all commands takes seconds."""

    def listed() -> None: ...

    defined = _defined(_source(entry), entry)
    listed.__doc__ = ast.get_docstring(defined) if defined else None
    return listed


def _source(entry: str) -> ast.Module:
    """The source of a command's module, which is not imported."""
    found = find_spec(entry.partition(":")[0])
    return ast.parse(Path(found.origin).read_text(encoding="utf-8") if found and found.origin else "")


def _defined(source: ast.Module, entry: str) -> ast.FunctionDef | None:
    name = entry.partition(":")[2]
    return next((each for each in source.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _check_options(entry: str, words: list[str]) -> None:
    """Refuse options that the command does not have, before its module is imported, which may take seconds."""
    if not (known := option_names(entry)):
        return
    for word in words[: words.index("--")] if "--" in words else words:
        given = word.partition("=")[0]
        if word.startswith("--") and given not in known and given.replace("--no-", "--", 1) not in known:
            raise UnknownName("option", given, known)


def option_names(entry: str) -> list[str]:
    """The long options of a command: its parameters' names, or what their annotations spell out."""
    source = _source(entry)
    if (defined := _defined(source, entry)) is None:
        return []
    aliases = {each.targets[0].id: each.value for each in source.body
               if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)}  # fmt: skip
    names = {"--help"}
    for argument in [*defined.args.args, *defined.args.kwonlyargs]:
        annotation = argument.annotation
        known = aliases.get(annotation.id) if isinstance(annotation, ast.Name) else None
        nodes = [each for tree in (argument, known) if tree for each in ast.walk(tree)]
        if any(isinstance(each, ast.Attribute) and each.attr == "Argument" for each in nodes):
            continue
        texts = (each.value for each in nodes if isinstance(each, ast.Constant))
        spelt = {text for text in texts if isinstance(text, str) and _LONG.fullmatch(text)}
        names |= spelt or {f"--{argument.arg.replace('_', '-')}"}
    return sorted(names)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"laconic {__version__}")
        raise typer.Exit


def _laconic(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options of `laconic` itself."""


def _nothing() -> None:
    """A callback makes Typer keep the group even when it has one command."""
