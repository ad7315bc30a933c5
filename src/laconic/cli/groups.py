"""Commands under one word, `laconic WORD COMMAND`, also those that other packages add.

Caller: `laconic.cli.main`. A package adds a group by an entry point of the group `laconic.commands`, which names a
`CommandGroup`. Entry points are read only for lists of commands and for a word that is none of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from laconic.errors import MissingExtra

ENTRY_POINTS = "laconic.commands"


@dataclass(frozen=True)
class CommandGroup:
    """Commands by name.

    Args:
        help: one sentence for the list of commands.
        commands: where each command's function is, as `module:function`; the module is imported when it is called.
    """

    help: str
    commands: Mapping[str, str]


def added(called: str | None) -> dict[str, CommandGroup]:
    """The groups that installed packages add.

    Raises:
        MissingExtra: the group `called` needs a package that is not installed. Of another group the list says so.
    """
    found = {}
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found[entry.name] = _load(entry)
        except MissingExtra as error:
            if entry.name == called:
                raise
            found[entry.name] = CommandGroup(str(error), {})
    return found


def _load(entry: EntryPoint) -> CommandGroup:
    try:
        loaded: CommandGroup = entry.load()
    except ImportError as error:
        owner = entry.dist.name if entry.dist else "laconic"
        raise MissingExtra(error.name or entry.module, entry.name, owner) from error
    return loaded
