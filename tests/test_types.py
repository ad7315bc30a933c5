"""Type checkers and editors understand the doors: user code and the examples pass, and mistakes are found.

Mypy checks as strictly as the package itself is checked, and shares its cache. The examples that override methods of
transformers and Lightning are left out: the types of these do not fit their own documentation.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import laconic
from laconic.exchange.options import Options

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "tests" / "typing_samples"
pytestmark = pytest.mark.timeout(300)  # a first run of mypy reads all of torch
LEFT_OUT = ("hf_trainer.py", "lightning_checkpoint.py")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in LEFT_OUT]


def _said(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    return done.stdout + done.stderr


def _wrong_lines(text: str) -> list[int]:
    return sorted({int(number) for number in re.findall(r"mistakes\.py:(\d+).*?error", text)})


def _marked() -> list[int]:
    lines = (SAMPLES / "mistakes.py").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# mistake")]


def test_mypy_understands_the_doors() -> None:
    checked = [SAMPLES / "user_code.py", SAMPLES / "mistakes.py", *EXAMPLES]
    said = _said(sys.executable, "-m", "mypy", "--no-error-summary", *checked)
    assert [line for line in said.splitlines() if "error" in line and "mistakes.py" not in line] == []
    assert _wrong_lines(said) == _marked()


def test_pyright_understands_the_doors() -> None:
    program = shutil.which("basedpyright", path=Path(sys.executable).parent) or shutil.which("pyright")
    if program is None:
        pytest.skip("neither pyright nor basedpyright is installed")
    said = _said(program, "--pythonpath", sys.executable, "--project", SAMPLES / "pyrightconfig.json")
    assert [line for line in said.splitlines() if " error: " in line and "mistakes.py" not in line] == []
    assert _wrong_lines(said) == _marked()


def test_the_doors_name_the_options_of_an_exchange_alike() -> None:
    """Written out in each door, so that an editor and `help` show them: with the types and defaults of `Options`."""
    options = {each.name: (each.type, each.default) for each in fields(Options)}
    for door, others in ((laconic.compress, {"overlap"}), (laconic.distribute, {"scaler"})):
        own = {n: (p.annotation, p.default) for n, p in inspect.signature(door).parameters.items() if n in options}
        assert own == {name: known for name, known in options.items() if name not in others}
