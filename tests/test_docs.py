"""Every example in the docs, the README and the docstrings runs."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import laconic

ROOT = Path(__file__).parents[1]
SOURCE = Path(laconic.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
DOCTESTED = [
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", DOCTESTED)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def _blocks(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    return [(page.name, block) for page in PAGES for block in pattern.findall(page.read_text())]


@pytest.mark.parametrize(("page", "code"), _blocks(PYTHON))
def test_python_blocks_run(page: str, code: str, tmp_path: Path) -> None:
    """Each ```python block is a whole script: it runs alone, as one rank."""
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "block"), _blocks(SHELL))
def test_console_blocks_run(page: str, block: str, tmp_path: Path) -> None:
    """Each `$ laconic …` line of a ```console block succeeds."""
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    assert commands, f"{page}: a console block without a command"
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "laconic", f"{page}: only laconic commands can be tested, not {command}"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run_under_torchrun(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr


def test_figures_in_the_docs_come_from_a_file() -> None:
    """Benchmark tables name the JSON they were made from, and it is there."""
    named = re.findall(r"benchmarks/results/[\w.-]+\.json", "\n".join(page.read_text() for page in PAGES))
    for name in set(named):
        assert json.loads((ROOT / name).read_text())
