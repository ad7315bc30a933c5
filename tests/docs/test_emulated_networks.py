"""The commands of the pages about `laconic run` work as printed, and so does the script with its lines added."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.laconic_lab.clusters.test_cluster import needs_root

PAGES = {name: (ROOT / "docs" / "guides" / name).read_text() for name in ("emulated-networks.md", "across-sites.md")}
EXAMPLE = ROOT / "examples" / "char_gpt.py"
COMMANDS = [
    line
    for page in PAGES.values()
    for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    for line in block.splitlines()
    if line.startswith("laconic run") and "char_gpt" in line
]
pytestmark = [pytest.mark.processes, pytest.mark.slow, needs_root]


def _run(words: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_pages_commands_run(command: str) -> None:
    assert re.search(r"\[0\] step [12]0: loss", _run(shlex.split(command), ROOT))


def test_all_pages_have_commands() -> None:
    assert len(COMMANDS) > 2
    assert any("--link 20mbit,40ms" in command for command in COMMANDS)


@pytest.mark.parametrize(("page", "link"), [("emulated-networks.md", "100mbit"), ("across-sites.md", "20mbit,40ms")])
def test_the_added_lines_work(page: str, link: str, tmp_path: Path) -> None:
    """The page's first block is a patch: lines without a sign are the script's."""
    block, *_ = re.findall(r"^```diff\n(.*?)^```", PAGES[page], re.M | re.S)
    kept = [line[1:] for line in block.splitlines() if line.startswith(" ")]
    added = [line[1:] for line in block.splitlines() if line.startswith("+")]
    text = EXAMPLE.read_text()
    (place,) = kept
    assert text.count(place) == 1
    (tmp_path / "changed.py").write_text(text.replace(place, f"{place}; {'; '.join(added)}"))
    printed = _run(["laconic", "run", "--hosts", "2", "--link", link, "changed.py", "--steps", "25"], tmp_path)
    assert "[0] step 25: loss" in printed
