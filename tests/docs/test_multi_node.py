"""The commands for several hosts as the page prints them, on two hosts with a network and a name of their own."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.transports import namespace
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "start" / "multi-node.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
HOSTS = {"first": "10.77.0.1", "second": "10.77.0.2"}
# Stands for ssh, which needs a daemon on every host: enters the host instead.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
exec nsenter -t $(cat {folder}/$host.pid) -n -m -u bash -c "$*"
"""


def _cannot() -> str:
    """Why this machine has no such hosts; empty if it has."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "two hosts are emulated by namespaces, which needs Linux and root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "hostname") if shutil.which(tool) is None]:
        return f"two hosts are emulated by namespaces, which needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "-mnu", "hostname", "first"], capture_output=True, text=True)
    return f"this system does not let us make namespaces: {tried.stderr}" if tried.returncode else ""


REASON = _cannot()
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(REASON), reason=REASON or "-")]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """A folder with the process of each host in NAME.pid, to be entered."""
    (tmp_path / "etc-hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in HOSTS.items()))
    with contextlib.ExitStack() as kept:
        networks = {name: namespace.create() for name in HOSTS}
        for network in networks.values():
            kept.callback(os.close, network)
        other = namespace.path_of(networks["second"])
        _in(networks["first"], "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
        for name, network in networks.items():
            _in(network, "ip", "link", "set", "lo", "up")
            _in(network, "ip", "link", "set", "eth0", "up")
            _in(network, "ip", "address", "add", f"{HOSTS[name]}/16", "dev", "eth0")
            init = f"mount --bind {tmp_path}/etc-hosts /etc/hosts && hostname {name} && touch {tmp_path}/{name}"
            command = ["unshare", "-mu", "bash", "-c", f"{init} && sleep 600"]
            process = namespace.inside(network, functools.partial(subprocess.Popen, command, start_new_session=True))
            kept.callback(_kill, process)
            (tmp_path / f"{name}.pid").write_text(str(process.pid))
        while not all((tmp_path / name).exists() for name in HOSTS):
            time.sleep(0.01)
        yield tmp_path


def _in(network: int, *command: str) -> None:
    namespace.inside(network, lambda: subprocess.run(command, check=True, capture_output=True))


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run(folder: Path, block: str, names: tuple[str, ...] = tuple(HOSTS), timeout_s: float = 100.0) -> str:
    """Run a block of the page on the hosts of these names, all at once; what they said, after all succeeded."""
    (folder / "ssh").write_text(SSH.format(folder=folder))
    (folder / "ssh").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT / "src")}
    processes, said = [], []
    try:
        for name in names:
            enter = ["nsenter", "-t", (folder / f"{name}.pid").read_text(), "-n", "-m", "-u"]
            processes.append(
                subprocess.Popen([*enter, "bash", "-ec", f"cd {folder}\n{block}"], env=environment, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
            )  # fmt: skip
        ends = time.monotonic() + timeout_s
        for process in processes:
            said.append(process.communicate(timeout=max(0.1, ends - time.monotonic()))[0])
            assert process.returncode == 0, said
    finally:
        for process in processes:
            _kill(process)
    return "\n".join(said)


def _block(*words: str) -> str:
    (found,) = [block for block in BLOCKS if all(word in block for word in words)]
    return found


def test_torchrun(hosts: Path) -> None:
    said = _run(hosts, _block("torchrun", "laconic train"))
    assert "2 workers" in said
    assert (hosts / "runs" / "latest" / "report.html").exists()


@pytest.mark.slow
def test_zmq_with_a_key(hosts: Path) -> None:
    _run(hosts, _block("laconic key"), ("first",))
    assert "zmq, 2 ranks" in _run(hosts, _block("LACONIC_KEY", "LACONIC_BIND"))


@pytest.mark.slow
def test_mpiexec(hosts: Path) -> None:
    pytest.importorskip("mpi4py")
    assert "2 workers" in _run(hosts, _block("mpiexec"), ("first",))


def test_the_tutorial_has_the_same_command() -> None:
    """The command that hangs without its rendezvous backend is printed nowhere."""
    for page in (ROOT / "docs").rglob("*.md"):
        for command in re.findall(r"^torchrun (?:.*\\\n)*.*$", page.read_text(), re.MULTILINE):
            assert "--nnodes" not in command or "--rdzv-backend c10d" in command, f"{page.name}: {command}"
