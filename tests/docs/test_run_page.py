"""The commands of the page about `laconic run` work as it prints them, and so does the script with its line added."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.lab.clusters.test_cluster import needs_root

PAGE = (ROOT / "docs" / "run.md").read_text()
EXAMPLE = ROOT / "examples" / "char_gpt.py"
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
pytestmark = [pytest.mark.processes, pytest.mark.slow, needs_root]


def _run(words: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", [command for command in COMMANDS if "laconic run" in command])
def test_the_pages_commands_run(command: str) -> None:
    assert "[0] step 20: loss" in _run(shlex.split(command), ROOT)


def test_the_added_line_works(tmp_path: Path) -> None:
    """The block is a patch: lines without a sign are the script's."""
    (block,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S)
    kept = [line[1:] for line in block.splitlines() if line.startswith(" ")]
    added = [line[1:] for line in block.splitlines() if line.startswith("+")]
    text = EXAMPLE.read_text()
    (place,) = kept
    assert text.count(place) == 1
    (tmp_path / "changed.py").write_text(text.replace(place, f"{place}; {'; '.join(added)}"))
    printed = _run(["laconic", "run", "--hosts", "2", "--link", "100mbit", "changed.py", "--steps", "5"], tmp_path)
    assert "[0] step 5: loss" in printed
