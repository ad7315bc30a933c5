"""A wheel of this repository works alone: as root and as nobody, with a home that can be written and without one.

For the Python of this environment, with its torch and the other packages, it trains. For the other versions that are
found it is installed beside what the command line needs, and answers without torch; `make smoke` installs all of it.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests import smoke
from tests.smoke import CASES, ROOT, Case

OTHERS = ["/usr/bin/python3.11", "/usr/bin/python3.12", "/usr/bin/python3.13", "/usr/local/bin/python3"]
# What answers without torch; `codecs` reads the list that was made with it.
LIGHT = """
import sys
from laconic.cli import main
ends = {"--help": 0, "--version": 0, "codecs": 0, "trian": 2, "bench --help": 0, "code --help": 0}
for line, end in ends.items():
    words = line.split()
    try:
        main(words)
    except SystemExit as ended:
        assert (ended.code or 0) == end, (words, ended.code)
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, in a folder that everybody may read, and unpacked in `installed` beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    built = smoke.build_wheel(folder)
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "installed")
    compileall.compile_dir(folder / "installed", quiet=1)  # once, not in every process of every user
    _open(folder)
    return built


@pytest.fixture(scope="module")
def codec_list(wheel: Path) -> Path:
    """A cache folder with the list of codecs in it."""
    folder = wheel.parent / "cache"
    variables = os.environ | {"LACONIC_CACHE": str(folder), "PYTHONPATH": str(wheel.parent / "installed")}
    subprocess.run([sys.executable, "-m", "laconic", "codecs"], check=True, capture_output=True, env=variables)
    return folder


def _open(folder: Path) -> None:
    """Let everybody enter a folder of ours, as far as it lies in this repository."""
    for each in (folder, *folder.parents):
        if each.is_relative_to(ROOT / ".cache"):
            each.chmod(0o755)


def _interpreter(case: Case) -> str | None:
    """A Python of this version that the user may run."""
    probe = f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    for path in [sys.executable, *OTHERS]:
        try:
            if subprocess.run([path, "-c", probe], timeout=60, **case.as_user).returncode == 0:
                return path
        except OSError:
            continue
    return None


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_wheel_works(case: Case, wheel: Path, tmp_path: Path) -> None:
    if case not in smoke.POSSIBLE:
        pytest.skip("only root can become nobody")
    python = _interpreter(case)
    packages = sysconfig.get_paths()["purelib"]
    if python is None:
        pytest.skip("no interpreter of this version that nobody may run")
    if subprocess.run(["ls", packages], stdout=subprocess.DEVNULL, **case.as_user).returncode:
        pytest.skip(f"nobody may not read {packages}")
    _open(tmp_path)
    program = shutil.copy(ROOT / "tests" / "smoke_program.py", tmp_path)
    words = [python, str(program), *(["train"] if case.has_home and case.user is not None else [])]
    done = case.run(words, tmp_path / "work", PYTHONPATH=f"{wheel.parent / 'installed'}:{packages}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("smoke: ok\n")


@pytest.mark.processes
@pytest.mark.timeout(300)  # a package index may be slow
@pytest.mark.parametrize("version", smoke.SUPPORTED)
def test_the_wheel_installs_for_every_python(version: str, wheel: Path, codec_list: Path, tmp_path: Path) -> None:
    if version not in (found := smoke.pythons()):
        pytest.skip(f"no Python {version} here")
    _open(tmp_path)
    python, variables = smoke.environment(*found[version], tmp_path)
    try:
        smoke.pip(python, "install", "--no-compile", "typer", "rich", "lazy_loader")
    except OSError as error:
        if "NewConnectionError" not in str(error):
            raise
        pytest.skip("no package index can be reached")
    smoke.pip(python, "install", "--no-deps", str(wheel))
    for position, case in enumerate(smoke.POSSIBLE):
        words = [str(python), "-c", LIGHT]
        done = case.run(words, tmp_path / f"work-{position}", LACONIC_CACHE=str(codec_list), **variables)
        assert done.returncode == 0, f"{case}: {done.stderr}"
        assert "topk" in done.stdout, case
