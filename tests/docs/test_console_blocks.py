"""Every `$ laconic …` line of a ```console block succeeds."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks

QUICK = ("README.md", "tutorial.md")  # what a newcomer follows; commands of other pages have tests of their own as well


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, marks=[] if page in QUICK else pytest.mark.slow)
        for page, block in blocks("console")
    ],
)
def test_console_blocks_run(page: str, block: str, tmp_path: Path) -> None:
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    assert commands, f"{page}: a console block without a command"
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "laconic", f"{page}: only laconic commands can be tested, not {command}"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
