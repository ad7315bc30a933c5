"""`laconic run`: a script that knows nothing of Laconic, on emulated hosts; however it ends, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from laconic.cli import main
from laconic_lab.clusters import cluster as cluster_module
from laconic_lab.clusters.programs import Tracebacks
from tests.docs.pages import ROOT
from tests.laconic_lab.clusters.test_cluster import needs_root, networks_of, processes_with

pytestmark = pytest.mark.processes
CHILD = 'child = subprocess.Popen(["sleep", "300"], start_new_session=True)'
# Every rank starts a process that leaves its session, and sleeps; the last one first does what the test is about.
SLEEPER = f"""
import os, signal, subprocess, sys, time
rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
{CHILD}
print("ready", flush=True)
if rank == last and len(sys.argv) > 1:
    time.sleep(0.3)
    exec(sys.argv[1])
time.sleep(300)
"""


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`laconic run` as a user starts it, in a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-m", "laconic", "run", *words], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heed_interrupts,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def _heed_interrupts() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and so would all that is started from there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def finished(folder: Path, *words: str) -> tuple[int, list[str], str]:
    """Exit code, what was printed, line by line in the order of ranks, and what was said besides."""
    with started(folder, *words) as process:
        printed, said = process.communicate(timeout=100)
        return process.returncode, sorted(printed.splitlines()), said


def after_ready(process: subprocess.Popen[str], ranks: int) -> set[str]:
    """Wait until all ranks sleep; the namespaces that they and the switch have."""
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(ranks)) == [f"[{rank}] ready\n" for rank in range(ranks)]
    return networks_of(process.pid)


def assert_nothing_left(networks: set[str]) -> None:
    deadline = time.monotonic() + 10
    while (left := processes_with(networks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


@needs_root
def test_a_plain_ddp_script_runs_unchanged(tmp_path: Path) -> None:
    words = ["--hosts", "2", "--link", "100mbit,5ms", "--pin", str(ROOT / "examples" / "char_gpt.py"), "--steps", "10"]
    code, printed, said = finished(tmp_path, *words)
    assert code == 0, said
    assert [line.split(":")[0] for line in printed] == ["[0] step 10", "[0] step 5"]
    assert "sent by each host, over 100mbit,5ms" in said
    assert os.listdir(tmp_path) == []


@needs_root
def test_ranks_are_placed_as_torchrun_places_them(tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(
        "import os, sys\n"
        "names = ['RANK', 'LOCAL_RANK', 'GROUP_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_WORLD_SIZE',\n"
        "         'ROLE_RANK', 'ROLE_WORLD_SIZE', 'TORCHELASTIC_RESTART_COUNT']\n"
        "print(*(os.environ[name] for name in names), *sys.argv[1:], len(os.sched_getaffinity(0)))\n"
        "print('to the other stream', file=sys.stderr)\n"
        "print(os.environ['MASTER_ADDR'] + ':' + os.environ['MASTER_PORT'] != ':', end='')\n"
    )
    words = ["--hosts", "2", "--link", "unlimited", "--nproc-per-host", "2", "--pin"]
    code, printed, said = finished(tmp_path, *words, "-m", "place", "--hosts", "a b")
    assert code == 0, said
    assert printed == sorted([
        "[0] 0 0 0 4 2 2 0 4 0 --hosts a b 1", "[1] 1 1 0 4 2 2 1 4 0 --hosts a b 1",
        "[2] 2 0 1 4 2 2 2 4 0 --hosts a b 1", "[3] 3 1 1 4 2 2 3 4 0 --hosts a b 1",
        *(f"[{rank}] True" for rank in range(4)),
    ])  # fmt: skip
    assert [f"[{rank}] to the other stream" in said for rank in range(4)] == [True] * 4


@needs_root
@pytest.mark.parametrize(
    ("does", "code", "how"),
    [
        ("sys.exit(7)", 7, "ended with exit code 7"),
        pytest.param("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL", marks=pytest.mark.slow),
    ],
    ids=["exit", "kill"],
)
def test_a_rank_that_fails_ends_all_with_its_code(does: str, code: int, how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLEEPER)
    with started(tmp_path, "--hosts", "2", "script.py", does) as process:
        networks = after_ready(process, 2)
        begun = time.monotonic()
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - begun < 30  # the others would sleep for 300 s
    assert process.returncode == code
    assert said.splitlines()[-1] == f"laconic: rank 1 on host 1 {how}; the other ranks were stopped"
    assert_nothing_left(networks)


@needs_root
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        (signal.SIGKILL, -9),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_nothing_is_left_of_a_command_that_is_ended(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = SLEEPER.replace(CHILD, "") if number == signal.SIGKILL else SLEEPER  # then nobody looks for children
    (tmp_path / "script.py").write_text(script)
    with started(tmp_path, "--hosts", "2", "script.py") as process:
        networks = after_ready(process, 2)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == code
    assert_nothing_left(networks)
    assert os.listdir(tmp_path) == ["script.py"]


@needs_root
def test_an_interrupt_is_one_line_a_rank(tmp_path: Path) -> None:
    chained = SLEEPER.replace("time.sleep(300)", "try: time.sleep(300)\nexcept KeyboardInterrupt: raise ValueError")
    (tmp_path / "script.py").write_text(chained.replace(CHILD, ""))
    with started(tmp_path, "--hosts", "2", "script.py") as process:
        after_ready(process, 2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert [line.split()[0] for line in sorted(said.splitlines())] == ["[0]", "[1]"], said
    assert "[1] Traceback" not in said


def test_tracebacks_are_left_out_with_torchs_prefix() -> None:
    tracebacks = Tracebacks()
    printed = "kept\n[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: KeyboardInterrupt\nkept too"
    assert tracebacks.without(printed.splitlines()) == ["kept", "kept too"]
    assert tracebacks.last == "KeyboardInterrupt"


@needs_root
def test_the_others_keep_going(tmp_path: Path) -> None:
    script = "import os, sys, time\ntime.sleep(2) if os.environ['RANK'] == '0' else sys.exit(7)\nprint('trained')"
    (tmp_path / "script.py").write_text(script)
    code, printed, said = finished(tmp_path, "--hosts", "2", "--keep-going", "script.py")
    assert (code, printed) == (0, ["[0] trained"])
    assert "laconic: rank 1 on host 1 ended with exit code 7; the others go on" in said.splitlines()
    (tmp_path / "script.py").write_text("import sys\nsys.exit(7)")
    code, _, said = finished(tmp_path, "--hosts", "1", "--keep-going", "script.py")
    assert code == 7
    assert said.splitlines()[-1] == "laconic: rank 0 on host 0 ended with exit code 7; no rank ended well"


@needs_root
@pytest.mark.slow
def test_ranks_that_do_not_want_to_end_are_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SLEEPER)
    with started(tmp_path, "--hosts", "2", "script.py") as process:
        networks = after_ready(process, 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert_nothing_left(networks)


def sentence(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a script: laconic run --hosts 4 --link 100mbit train.py; or a module with -m"),
        (["--hosts", "2"], "name a script"),
        (["nowhere.py", "--hosts", "2"], "there is no script 'nowhere.py'; a module is started with -m"),
        (["-m", "no_such_module.at_all"], "there is no module 'no_such_module.at_all'; a script is started without -m"),
        (["-m", "train.py/x"], "there is no module 'train.py/x'"),
        (["--link", "fast", __file__], "the rate is 'unlimited', or should be a number"),
        (["--hosts", "0", __file__], "a cluster has 1 to 64 hosts"),
        (["--hosts", "1", "--between", "1mbit", __file__], "two sites need at least 2 hosts"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in sentence(capsys, *words)


@needs_root
def test_no_process_on_a_host_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a host has at least 1 rank, got 0" in sentence(capsys, "--nproc-per-host", "0", __file__)


def test_without_root_it_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.os, "geteuid", lambda: 1000)
    assert "an emulated cluster needs root" in sentence(capsys, __file__)
