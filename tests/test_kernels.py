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

INNER = """
from laconic.kernels import njit
def inner(n):
    @njit(cache=True)
    def add(x):
        return x + n
    return add
"""
OUTER = """
from inner import inner
from laconic.kernels import njit
def outer(n):
    add = inner(n)
    @njit(cache=True)
    def double(x):
        return 2 * add(x)
    return double
for n in (1, 5):
    kernel = outer(n)
    print(kernel(10), sum(kernel.stats.cache_hits.values()))
"""
WARM = """
import gc, sys
from types import ModuleType
from numba.core.registry import CPUDispatcher
from laconic.ahead import compile_all
for _ in compile_all():
    pass
modules = [module for name, module in sys.modules.items() if name.startswith("laconic")]
kernels = {value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}
everywhere = {value for value in gc.get_objects() if isinstance(value, CPUDispatcher)} | kernels  # also in functions
used = ahead = {kernel for kernel in everywhere if kernel.signatures}
while ahead:
    near = [(kernel.py_func.__globals__, kernel.py_func.__code__.co_names) for kernel in ahead]
    named = [(table.get(name), names) for table, names in near for name in names]
    inside = [getattr(value, name, None) for value, names in named if isinstance(value, ModuleType) for name in names]
    ahead = {value for value in [*(value for value, _ in named), *inside] if isinstance(value, CPUDispatcher)} - used
    used = used | ahead
print(len(used & kernels))
print(sorted(kernel.py_func.__qualname__ for kernel in kernels - used))
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
    assert "compiled again in every process" in done.stderr


def test_a_command_says_so_in_one_line(tmp_path: Path) -> None:
    code = f"{READ_ONLY}\nfrom laconic.cli import main\nmain(['inspect', 'nothing.lac'])"
    done = _run(code, ALLOWED="", TMPDIR=str(tmp_path))
    told, why = done.stderr.splitlines()
    assert told.startswith("laconic: kernels are compiled again in every process")
    assert why.startswith("laconic: nothing.lac"), why


def test_kernels_made_of_others_are_compiled_once(tmp_path: Path) -> None:
    """Numba's own key of a closure is another in every process; operators took 30 s to compile in each."""
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "outer.py").write_text(OUTER)

    def said() -> list[str]:
        command = [sys.executable, "-B", "outer.py"]
        environment = os.environ | {"PYTHONPATH": str(SOURCE.parent), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert said() == ["22 0", "30 0"]
    assert said() == ["22 1", "30 1"]
    (tmp_path / "inner.py").write_text(INNER.replace("x + n", "x - n"))
    assert said() == ["18 0", "10 0"], "the file of the inner kernel has changed"


@pytest.mark.parametrize("path", sorted(SOURCE.parent.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE.parent)))
def test_every_kernel_is_compiled_there(path: Path) -> None:
    if path.name != "kernels.py":
        text = path.read_text()
        assert "numba.njit" not in text
        assert "from numba import njit" not in text


def test_warm_compiles_every_kernel() -> None:
    """Every kernel has been called after `compile_all`, or is used by one that has."""
    done = _run(f"{WARM}", NUMBA_CACHE_DIR=os.environ.get("NUMBA_CACHE_DIR", ""))
    assert done.returncode == 0, done.stderr
    compiled, left = done.stdout.splitlines()
    assert int(compiled) > 90
    assert left == "[]"
