"""A Python that has imported what examples import, and forks for each script: nine seconds of imports are paid once.

Run as a program it reads a line of JSON for each script, {"script", "folder", "environments", "timeout_s"}, and answers
with one: {"code", "said"}. Callers: the tests of this folder, through `PreparedPython`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from laconic.transports.launcher import Host, rank_variables


class PreparedPython:
    """Runs scripts, each in a process of its own; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: Path, timeout_s: float = 100.0) -> tuple[int, str]:
        """The exit code and all that the script said, run in its own folder."""
        return self._run(script, script.parent, [{}], timeout_s)

    def run_ranks(self, script: Path, folder: Path, ranks: int = 2, **variables: str) -> tuple[int, str]:
        """The worst exit code and all that the ranks said, run in `folder` as torchrun would, with a thread each."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environments = rank_variables([Host()] * ranks, store)
        return self._run(script, folder, [{**variables, **own} for own in environments], 100.0)

    def _run(self, script: Path, folder: Path, environments: list[dict[str, str]], timeout_s: float) -> tuple[int, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = {"script": str(script), "folder": str(folder), "environments": environments, "timeout_s": timeout_s}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["said"]

    def __enter__(self) -> PreparedPython:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _serve() -> None:
    import multiprocessing.util

    import numba  # noqa: F401
    import torch._dynamo  # noqa: F401  what the first optimiser imports

    import laconic.consistency.distribute
    import laconic.exchange.state  # noqa: F401

    atexit._clear()  # what is registered from here on is a script's own, and what it needs of multiprocessing's
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers goes there
    for line in sys.stdin:
        task = json.loads(line)
        said = Path(task["folder"]) / "said.txt"
        said.touch()
        deadline = time.monotonic() + task["timeout_s"]
        children = [_start(task["script"], task["folder"], own, said) for own in task["environments"]]
        code = max((_wait(child, deadline) for child in children), key=abs)
        answers.write(json.dumps({"code": code, "said": said.read_text()}) + "\n")
        answers.flush()


def _start(script: str, folder: str, variables: dict[str, str], said: Path) -> int:
    """The process that runs this script, in a process group of its own."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _become(script, folder, variables, said)
    with contextlib.suppress(OSError):  # the child may have done it already, or be gone
        os.setpgid(child, child)
    return child


def _become(script: str, folder: str, variables: dict[str, str], said: Path) -> NoReturn:
    """Be the process that runs this script."""
    code = 1
    os.environ.update(variables)
    if "RANK" in variables:
        torch.set_num_threads(1)
        torch.seed()  # as in a process of its own: a fork would draw what the other ranks draw
    descriptor = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    sys.argv = [script]
    sys.path[0] = folder
    try:
        exec(compile(Path(script).read_text(), script, "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """End as an interpreter does: wait for threads, then run what the script has registered."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(child: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -int(signal.SIGKILL)


if __name__ == "__main__":
    _serve()
