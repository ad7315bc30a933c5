"""Every `laconic …` of every page is understood by the command line; most are run elsewhere, or by `make slow`."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from click import Command

from laconic import cli
from laconic.cli.groups import CommandGroup
from tests.docs.pages import PAGES, ROOT, blocks

# `$ laconic …`, `python -m laconic …`, `VARIABLE=value laconic …`; `laconic -m …` of torchrun is not one
IN_BLOCK = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\S.* -m )?laconic (.*)$", re.MULTILINE)
IN_TEXT = re.compile(r"`laconic ([a-z][^`]*)`")
LINES = [
    (page, line)
    for language in ("sh", "console", "bash")
    for page, block in blocks(language)
    for line in IN_BLOCK.findall(block.replace("\\\n", " "))
]


@functools.cache
def command(*names: str) -> Command:
    """`laconic NAME` or `laconic GROUP NAME`, as the user calls it."""
    found = typer.main.get_command(cli._group("laconic", cli.HELP, cli._table(list(names)), list(names)))
    for name in names:
        found = found.commands[name]  # type: ignore[attr-defined]
    return found


def named(words: list[str]) -> int:
    """How many words name the command."""
    return 2 if isinstance(cli._table(words).get(words[0]), CommandGroup) and len(words) > 1 else 1


def test_there_are_commands_to_look_at() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize(("page", "line"), LINES)
def test_commands_in_blocks_are_understood(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    command(*words[: named(words)]).make_context("laconic", words[named(words) :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_text_are_known(page: Path) -> None:
    for line in IN_TEXT.findall(page.read_text()):
        words = line.split()
        found = command(*words[: named(words)])
        known = {option for parameter in found.params for option in parameter.opts}
        written = re.findall(r"(?<=\s)--?[a-z][a-z-]*", line)
        assert words[0] == "run" or known.issuperset(written), f"{page.name}: {line}"


def test_the_page_of_commands_says_what_help_says() -> None:
    """docs/reference/commands.md has a row for every command, with the first paragraph of its help."""
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for name in cli._table([]):
        said = (command(name).help or "").split("\n\n")[0].replace("\n", " ").strip()
        assert f"| `laconic {name}` | {said} |" in page, f"{name}: {said}"
