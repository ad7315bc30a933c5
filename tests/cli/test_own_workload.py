"""A workload of the user's own, module:factory: in the spawned ranks, elastic, compared, resumed and in the record."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laconic.cli import main
from laconic_lab.records.record import Record

MODULE = '''
import time
from dataclasses import replace
from pathlib import Path

from torch import nn

from laconic.workloads import get
from laconic.workloads.models.registry import network


@network("own-net")
def own_net(width=16):
    """A small network."""
    return nn.Sequential(Slow(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Slow(nn.Flatten):
    """Takes its time while there is a file `slow`."""

    def forward(self, x):
        if Path("slow").exists():
            time.sleep(0.2)
        return super().forward(x)


def small(width=16, epochs=1):
    return replace(get("digits-mlp"), model=f"own-net({width})", epochs=epochs)
'''
NONE = '''
def number(width=16):
    return width


constant = 3
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_workloads.py").write_text(MODULE)
    (tmp_path / "no_workloads.py").write_text(NONE)
    (tmp_path / "broken_workloads.py").write_text("import not_there\n")
    return tmp_path


def _laconic(folder: Path, *words: str) -> str:
    command = [sys.executable, "-c", "from laconic.cli import main; main()", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_compared(folder: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "examples" / "my_workload.py", folder)
    said = _laconic(folder, "compare", "my_workload:mine(32)", "-n", "2", "--configs", "ddp,dynamic8", "--seeds", "1")
    assert "compress:dynamic8" in said
    record = Record.load(folder / "runs" / "latest")
    assert [trial.failed for trial in record.trials] == [None, None]
    assert (record.workload.name, record.workload.model) == ("my_workload:mine(32)", "my-network(32)")
    assert record.id.endswith("my-workload-mine-32")
    assert all((trial.test_accuracy or 0) > 0.8 for trial in record.trials)


@pytest.mark.processes
def test_trained_by_the_codec_of_the_page(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "write-a-codec.md").read_text()
    (folder / "upper.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (folder / "coded.py").write_text("import upper\nfrom own_workloads import small\n")
    said = _laconic(folder, "train", "coded:small", "-n", "2", "--codec", "upper")
    assert "tensor(" not in said, "the page's demo is not run by an import"
    assert [each.codec for each in Record.load(folder / "runs" / "latest").configurations] == ["upper"]


@pytest.mark.processes
def test_trained_elastic(folder: Path) -> None:
    _laconic(folder, "train", "own_workloads:small", "-n", "2", "--elastic")
    assert Record.load(folder / "runs" / "latest").finished


@pytest.mark.processes
def test_stopped_and_resumed(folder: Path) -> None:
    (folder / "slow").touch()  # a step takes longer than the signal, however starved this process is
    words = ["train", "own_workloads:small(epochs=3)", "-n", "2"]
    command = [sys.executable, "-c", "from laconic.cli import main; main()", *words]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not list(folder.glob("runs/2*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    (folder / "slow").unlink()
    assert "weights sha256" in _laconic(folder, "train", "--resume", "runs/latest")
    record = Record.load(folder / "runs" / "latest")
    assert (record.finished, record.starts) == (True, 2)
    assert record.workload.epochs == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:small", "module 'nowhere' cannot be imported: ModuleNotFoundError"),
        ("broken_workloads:small", "module 'broken_workloads' cannot be imported: ModuleNotFoundError: No"),
        ("no_workloads:large", "module 'no_workloads' has no 'large'"),
        ("no_workloads:constant", "'constant' is a int, not a function that makes a Workload"),
        ("no_workloads:number", "'number' made a int, not a laconic.workloads.Workload"),
        ("no_workloads:number(depth=3)", "depth"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_is_none_is_one_sentence(
    folder: Path, command: str, name: str, says: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for module in ("no_workloads", "broken_workloads"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    before = os.listdir(folder)
    with pytest.raises(SystemExit) as ended:
        main([command, name])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert set(os.listdir(folder)) - set(before) <= {"__pycache__"}
