"""Installs a wheel for every supported Python of this machine, and says who must be able to run it.

Callers: `tests/test_wheel.py`, and `make smoke`, which installs all that the wheel asks for, torch first, and runs
`smoke_program.py` as this user and as nobody, with a home that can be written and without one.

    python tests/smoke.py                                  every Python found, torch 2.13.0
    python tests/smoke.py --versions 3.13 --torch 2.6.0
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUPPORTED = ("3.11", "3.12", "3.13")
NOBODY = 65534
PROBE = r"import sys, venv; print(sys._base_executable, sys.base_prefix, '%d.%d' % sys.version_info[:2], sep='\n')"


@dataclass(frozen=True)
class Case:
    """Who runs it: this user or nobody, with a home that can be written or without one."""

    user: int | None
    has_home: bool

    def __str__(self) -> str:
        who = "nobody" if self.user is not None else "root" if os.geteuid() == 0 else "own user"
        return f"{who}, {'home' if self.has_home else 'no home'}"

    @property
    def as_user(self) -> dict[str, Any]:
        """What makes subprocess.run become that user."""
        return {} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": []}

    def run(self, words: Sequence[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program in a new folder that belongs to the user."""
        folder.mkdir()
        if self.user is not None:
            shutil.chown(folder, self.user, self.user)
        home = folder if self.has_home else folder / "nothing"
        variables = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1",
                     "PYTHONDONTWRITEBYTECODE": "1"} | environment  # fmt: skip
        return subprocess.run(
            words, cwd=folder, env=variables, capture_output=True, text=True, timeout=1200, **self.as_user
        )


CASES = tuple(Case(user, has_home) for user in (None, NOBODY) for has_home in (True, False))
POSSIBLE = CASES if os.geteuid() == 0 else CASES[:2]  # only root can become nobody


def build_wheel(folder: Path) -> Path:
    """The repository's wheel, built from a copy of what it is made of."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    (built,) = folder.glob("laconic-*.whl")
    return built


def pip(python: str | Path, *words: str) -> None:
    """Run this environment's pip under another Python, which sees no package but its own."""
    program = [sys.executable, "-m", "pip", "--python", str(python), "-q", "--disable-pip-version-check"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*program, "--retries", "1", *words], capture_output=True, text=True, env=alone)
    if done.returncode != 0:
        raise OSError(f"pip {' '.join(words)}: {done.stderr[-2000:]}")


def pythons() -> dict[str, tuple[str, str]]:
    """The first working Python of each supported version and its prefix: on the PATH, then of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    listed = [path for path in map(Path, os.get_exec_path()) if path != pyenv / "shims"]
    found = {}
    for version in SUPPORTED:
        places = [*listed, *sorted(pyenv.glob(f"versions/{version}*/bin"))]
        seen = (_probe(place / f"python{version}") for place in places)
        if first := next((each[:2] for each in seen if each and each[2] == version), None):
            found[version] = first
    return found


def _probe(path: Path) -> tuple[str, str, str] | None:
    """The interpreter itself, its prefix and its version; None where there is none that works."""
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    executable, prefix, version = done.stdout.splitlines()
    return executable, prefix, version


def environment(python: str, prefix: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """An empty environment that nobody can use, too: its Python, and the variables that it needs.

    A Python in a folder that others may not enter, such as pyenv's in root's home, is copied (or linked) first.
    """
    variables: dict[str, str] = {}
    if not all(_can_run(case, python) for case in POSSIBLE):
        skip = shutil.ignore_patterns("site-packages", "test", "idlelib", "share", "*.a")
        copy = Path(shutil.copytree(prefix, folder / "python", symlinks=True, ignore=skip, copy_function=_link))
        python = str(copy / "bin" / Path(python).name)
        variables = {"LD_LIBRARY_PATH": str(copy / "lib")}
    made = folder / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", made], check=True, env=os.environ | variables)
    return made / "bin" / "python", variables


def _can_run(case: Case, python: str) -> bool:
    try:
        return case.user is None or subprocess.run([python, "-c", ""], **case.as_user).returncode == 0
    except OSError:
        return False


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def everywhere(versions: Sequence[str], torch: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Install and run everything; yields version, who ran it, and how it went."""
    wheel = build_wheel(folder / "wheel")
    program = Path(shutil.copy(ROOT / "tests" / "smoke_program.py", folder))
    for version, (python, prefix) in pythons().items():
        if version not in versions:
            continue
        own = folder / version
        own.mkdir()
        installed, variables = environment(python, prefix, own)
        begun = time.perf_counter()
        pip(installed, "install", f"torch=={torch}")
        pip(installed, "install", f"{wheel}[code,shrink,lab]")
        yield version, "installed", f"{time.perf_counter() - begun:.0f} s"
        for position, case in enumerate(POSSIBLE):
            done = case.run([str(installed), str(program), "train"], own / f"work-{position}", **variables)
            well = done.returncode == 0 and done.stdout.endswith("smoke: ok\n")
            yield version, str(case), "ok" if well else f"failed\n{done.stderr[-3000:]}"
        shutil.rmtree(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default=",".join(SUPPORTED), help="of Python, joined by commas")
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache", help="in which it is installed for a while")
    asked = parser.parse_args()
    ends = []
    with tempfile.TemporaryDirectory(prefix="smoke-", dir=asked.folder) as name:
        Path(name).chmod(0o755)
        for version, who, end in everywhere(asked.versions.split(","), asked.torch, Path(name)):
            print(f"Python {version}, torch {asked.torch}, {who}: {end}", flush=True)
            ends.append(end)
    if not ends or any(end.startswith("failed") for end in ends):
        sys.exit("smoke: failed" if ends else "smoke: no such Python was found")


if __name__ == "__main__":
    main()
