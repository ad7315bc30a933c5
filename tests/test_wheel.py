"""A wheel of this repository works alone: as root and as nobody, with a home that can be written and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOBODY = 65534
OTHERS = ["/usr/bin/python3.11", "/usr/bin/python3.12", "/usr/bin/python3.13", "/usr/local/bin/python3"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, in a folder that everybody may read."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", str(folder), str(source)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("laconic-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "installed")
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent.is_relative_to(ROOT / ".cache"):
            parent.chmod(0o755)
    return folder / "installed"


def _interpreter(user: int | None) -> str | None:
    """A Python of this version that the user may run."""
    probe = f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    for path in [sys.executable, *OTHERS]:
        try:
            if subprocess.run([path, "-c", probe], timeout=60, **_as(user)).returncode == 0:
                return path
        except OSError:
            continue
    return None


def _as(user: int | None) -> dict[str, Any]:
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


@pytest.mark.processes
@pytest.mark.parametrize("has_home", [True, False], ids=["home", "no home"])
@pytest.mark.parametrize("user", [None, NOBODY], ids=["own user", "nobody"])
def test_the_wheel_works(user: int | None, has_home: bool, wheel: Path, tmp_path: Path) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    python = _interpreter(user)
    packages = sysconfig.get_paths()["purelib"]
    if python is None:
        pytest.skip("no interpreter of this version that nobody may run")
    if user is not None and subprocess.run(["ls", packages], stdout=subprocess.DEVNULL, **_as(user)).returncode:
        pytest.skip(f"nobody may not read {packages}")
    work = tmp_path / "work"
    work.mkdir()
    for folder in (work, *(p for p in tmp_path.parents if p.is_relative_to(ROOT / ".cache"))):
        folder.chmod(0o755)
    tmp_path.chmod(0o755)
    program = Path(shutil.copy(ROOT / "tests" / "smoke_program.py", work))
    if user is not None:
        shutil.chown(work, user, user)
    home = work if has_home else tmp_path / "nothing"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(work), "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": f"{wheel}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    words = [python, str(program), *(["train"] if has_home and user is not None else [])]
    done = subprocess.run(
        words, cwd=work, env=environment, capture_output=True, text=True, timeout=110, **_as(user)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("smoke: ok\n")
