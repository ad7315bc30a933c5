"""Every ```python block of the pages, and every example script, is a whole script: it runs alone, as one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import EXAMPLES, ROOT, blocks
from tests.docs.prepared import PreparedPython


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_blocks_run(page: str, code: str, tmp_path: Path, python: PreparedPython) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    returned, said = python.run(script)
    assert returned == 0, said


# what joins the ranks that torchrun starts; a HashStore makes a process group of one, and run_threads ranks of its own
JOINING = [
    (page, code)
    for page, code in blocks("python")
    if re.search(r"laconic\.(init|distribute|divide)\(", code) and not re.search(r"HashStore|run_threads", code)
]


@pytest.mark.processes
@pytest.mark.parametrize(("page", "code"), JOINING)
def test_python_blocks_run_on_two_ranks(page: str, code: str, tmp_path: Path, python: PreparedPython) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    returned, said = python.run_ranks(script, tmp_path)
    assert returned == 0, said


def test_a_script_that_fails_is_noticed(tmp_path: Path, python: PreparedPython) -> None:
    script = tmp_path / "example.py"
    script.write_text("print('before')\nraise ValueError('on purpose')\n")
    returned, said = python.run(script)
    assert returned == 1
    assert "before" in said
    assert "on purpose" in said
    waiting = "import threading\nevent = threading.Event()\n"
    for waits in ("event.wait()\n", "threading.Thread(target=event.wait).start()\n"):
        script.write_text(waiting + waits)
        assert python.run(script, timeout_s=0.5)[0] == -9
    script.write_text("import atexit\natexit.register(print, 'at the end')\n")
    assert "at the end" in python.run(script)[1]


README = (ROOT / "README.md").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=[] if path.name == "ddp_one_line.py" else pytest.mark.slow) for path in EXAMPLES],
    ids=lambda path: path.name,
)
def test_examples_run_under_torchrun(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    if example.name == "ddp_one_line.py":  # as README shows; the accuracy may round otherwise
        (shown,) = (line for line in README.splitlines() if line.startswith("2 ranks: "))
        assert shown.split(";")[1] == done.stdout.strip().split(";")[1]
        assert float(done.stdout.split()[2].rstrip("%")) > 94


@pytest.mark.processes
def test_the_pipeline_runs_on_two_ranks(tmp_path: Path, python: PreparedPython) -> None:
    returned, said = python.run_ranks(ROOT / "examples" / "pipeline_transformer.py", tmp_path)
    assert returned == 0, said


def test_readme_shows_lines_of_the_example() -> None:
    (diff,) = (block for page, block in blocks("diff") if page == "README.md")
    example = (ROOT / "examples" / "ddp_one_line.py").read_text()
    added = [line[1:].split("  #")[0].strip() for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 2
    assert all(line in example for line in added)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run_alone(example: Path, tmp_path: Path, python: PreparedPython) -> None:
    script = tmp_path / example.name
    script.write_text(example.read_text())
    returned, said = python.run(script)
    assert returned == 0, said
