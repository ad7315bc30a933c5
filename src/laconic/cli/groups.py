"""Commands of other packages, and commands under one word, `laconic WORD COMMAND`.

Caller: `laconic.cli.main`. A package adds commands by an entry point of the group `laconic.commands`. It names a
`CommandGroup`, whose commands follow the entry point's name, or a `CommandTable`, whose commands stand beside ours.
Entry points are read only for lists of commands and for a word that is none of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from typer.core import TyperGroup

from laconic.errors import MissingExtra

ENTRY_POINTS = "laconic.commands"


class WholeSentences(TyperGroup):
    """A list of commands whose descriptions are wrapped, not cut off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command's name beside the first paragraph of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, " ".join((each.help or "").partition("\n\n")[0].split())) for name, each in commands if each]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


@dataclass(frozen=True)
class CommandGroup:
    """Commands by name.

    Args:
        help: one sentence for the list of commands.
        commands: where each command's function is, as `module:function`; the module is imported when it is called.
    """

    help: str
    commands: Mapping[str, str]


@dataclass(frozen=True)
class CommandTable:
    """Commands and groups by name, for a package's entry point.

    Args:
        commands: as in `CommandGroup`, or a group.
        check: called with what the user typed before one of these commands is imported; raises LaconicError.
    """

    commands: Mapping[str, str | CommandGroup]
    check: Callable[[Sequence[str]], None] = lambda words: None


def added(called: str | None) -> list[CommandTable]:
    """The commands that installed packages add.

    Raises:
        MissingExtra: the group `called` needs a package that is not installed. Of another group the list says so.
    """
    found = []
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            loaded = _load(entry)
        except MissingExtra as error:
            if entry.name == called:
                raise
            loaded = CommandGroup(str(error), {})
        found.append(loaded if isinstance(loaded, CommandTable) else CommandTable({entry.name: loaded}))
    return found


def _load(entry: EntryPoint) -> CommandGroup | CommandTable:
    try:
        loaded: CommandGroup | CommandTable = entry.load()
    except ImportError as error:
        owner = entry.dist.name if entry.dist else "laconic"
        raise MissingExtra(error.name or entry.module, entry.name, owner) from error
    return loaded
