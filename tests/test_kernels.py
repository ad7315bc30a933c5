"""Kernels where nothing can be written: the package imports and codecs work, with a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import laconic

SOURCE = Path(laconic.__file__).parent
CODEC = """
import os, laconic
from laconic.codecs import frame, random
print(random.bits32(random.key(0, 1), 2) >= 0, os.environ.get("NUMBA_CACHE_DIR"))
"""
# Stands for a machine on which only folders under ALLOWED can be written.
READ_ONLY = """
import os
from numba.core import caching
before = caching._CacheLocator.ensure_cache_path
def ensure_cache_path(self):
    if not os.environ["ALLOWED"] or not self.get_cache_path().startswith(os.environ["ALLOWED"]):
        raise PermissionError("read-only")
    before(self)
caching._CacheLocator.ensure_cache_path = ensure_cache_path
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    inherited |= {"PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run([sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True)


def test_kernels_are_kept_in_a_temporary_folder_of_the_job(tmp_path: Path) -> None:
    code = f"{READ_ONLY}\n{CODEC}\nassert os.listdir(os.environ['NUMBA_CACHE_DIR'])"
    done = _run(code, ALLOWED=str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"True {tmp_path}/laconic-kernels-" in done.stdout
    assert done.stderr.count("RuntimeWarning") == 1
    assert "kept in" in done.stderr
    assert list(tmp_path.iterdir()) == [], "it goes with the job"


def test_kernels_are_compiled_in_memory_where_there_is_no_folder_at_all(tmp_path: Path) -> None:
    done = _run(f"{READ_ONLY}\n{CODEC}", ALLOWED="", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "True" in done.stdout
    assert "compiled anew in every process" in done.stderr


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_kernel_is_compiled_there(path: Path) -> None:
    if path.name != "kernels.py":
        text = path.read_text()
        assert "numba.njit" not in text
        assert "from numba import njit" not in text
