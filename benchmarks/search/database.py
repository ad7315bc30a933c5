"""A PostgreSQL server of one's own, from Debian's package, for tests and kill tests.

Callers: the kill tests and the tests of storages. The server lives in a folder of its own, listens on 127.0.0.1 and
ends with the block. Root may not run it, so that under root it runs as nobody.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534
_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def why_absent() -> str:
    """Why there can be no server here; empty where there can."""
    if not _BINARIES:
        return "PostgreSQL is not installed: apt-get install postgresql"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'laconic[search]'"
    return ""


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        url: of its database, as `--storage` takes it.
        control: the beginning of a pg_ctl command for it.
    """

    url: str
    control: tuple[str, ...]

    def restart(self) -> None:
        """Stop it without mercy, and start it again."""
        _run([*self.control, "-m", "immediate", "restart"])

    def break_connections(self) -> int:
        """Cut every connection to it; how many there were."""
        import psycopg

        others = "usename = 'laconic' AND pid <> pg_backend_pid()"
        sql = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            return len(connection.execute(sql).fetchall())


@contextlib.contextmanager
def postgres() -> Iterator[Server]:
    """A server with an empty database; check `why_absent` first."""
    with tempfile.TemporaryDirectory(prefix="laconic-pg", dir="/tmp") as name, socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        reserved.close()
        folder, as_user = Path(name), []
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            as_user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        data, tools = str(folder / "data"), _BINARIES[-1]
        control = (*as_user, str(tools / "pg_ctl"), "-D", data, "-l", str(folder / "log"), "-w", "-o",
                   f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off")  # fmt: skip
        _run([*as_user, str(tools / "initdb"), "-D", data, "-A", "trust", "-U", "laconic"])
        try:
            _run([*control, "start"])
            yield Server(f"postgresql://laconic@127.0.0.1:{port}/postgres", control)
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], capture_output=True, cwd="/", timeout=60, check=False)
            shutil.rmtree(folder / "data", ignore_errors=True)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, cwd="/", timeout=100)
