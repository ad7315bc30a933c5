"""Every `$ laconic …` line of a ```console block succeeds.

Here and not in processes of their own, each of which would import torch, and again for its ranks.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from laconic.cli import main
from tests.docs.pages import blocks

# what a newcomer follows; commands of other pages have tests of their own as well
QUICK = ("README.md", "docs/start/quickstart.md")


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, marks=[] if page in QUICK else pytest.mark.slow)
        for page, block in blocks("console")
    ],
)
def test_console_blocks_run(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    assert commands, f"{page}: a console block without a command"
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "laconic", f"{page}: only laconic commands can be tested, not {command}"
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        assert ended.value.code in (0, None), command
