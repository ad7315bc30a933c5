"""Commands of another package: found by its entry point, listed, and one sentence where they cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.cli import main

COMMANDS = '''
"""Greetings."""
import typer
from laconic.cli.groups import CommandGroup

GREET = CommandGroup("Greet people.", {"hello": "greetings:hello"})


def hello(name: str) -> None:
    """Say hello."""
    typer.echo(f"hello {name}")
'''


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution `greetings` whose group `greet` works, and whose group `part` misses a package."""
    (tmp_path / "greetings").mkdir()
    (tmp_path / "greetings" / "__init__.py").write_text(COMMANDS)
    (tmp_path / "greetings" / "parting.py").write_text("import no_such_package\n")
    about = tmp_path / "greetings-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[laconic.commands]\ngreet = greetings:GREET\npart = greetings.parting:PART\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def _ended(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_a_package_adds_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert _ended(["greet", "hello", "Leonidas"]) == 0
    assert capsys.readouterr().out == "hello Leonidas\n"


def test_all_groups_are_listed_though_one_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert _ended(["--help"]) == 0
    said = capsys.readouterr().out
    assert "Greet people." in said
    assert "no_such_package is not installed" in said


def test_a_group_that_cannot_be_loaded_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert _ended(["part", "now"]) == 2
    said = capsys.readouterr().err
    assert said == "laconic: no_such_package is not installed; run: pip install 'greetings[part]'\n"
