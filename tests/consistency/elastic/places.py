"""Meeting places for tests: a folder, a `laconic meet` in a thread, and a real etcd where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from laconic.consistency.elastic.places.server import MeetingServer

KINDS = ("folder", "tcp", "etcd")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Served:
    """A meeting server in a thread, which can be away for a while."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder, self.port = folder, port or free_port()
        self.start()

    def start(self) -> None:
        self._over = threading.Event()
        self._server = MeetingServer(self.folder, "127.0.0.1", self.port, None)
        self._thread = threading.Thread(target=self._server.serve, args=(self._over.is_set,))
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()

    def where(self, job: str = "job") -> str:
        return f"tcp://127.0.0.1:{self.port}/{job}"


class Etcd:
    """A member of etcd of its own, as a process.

    Args:
        tls: a certificate and its key, as files.
    """

    def __init__(self, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        self.folder, self.port, self._peer_port = folder, free_port(), free_port()
        self._tls = tls
        self.start()

    def start(self) -> None:
        scheme, files = ("https" if self._tls else "http"), map(str, self._tls or ())
        url, peer = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        shown = [word for pair in zip(("--cert-file", "--key-file"), files, strict=False) for word in pair]
        self._process = subprocess.Popen(
            ["etcd", "--data-dir", str(self.folder), "--listen-client-urls", url, "--advertise-client-urls", url,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
             *shown],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            trust = ssl.create_default_context(cafile=str(self._tls[0])) if self._tls else None
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{url}/health", timeout=1, context=trust) as answer,
            ):
                if b"true" in answer.read():
                    return
            time.sleep(0.05)
        raise RuntimeError("etcd did not come up in 30 s")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def where(self, job: str = "job") -> str:
        return f"etcd://127.0.0.1:{self.port}/{job}"


def has_etcd() -> bool:
    try:
        import etcd3gw  # noqa: F401
    except ImportError:
        return False
    return shutil.which("etcd") is not None


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """Where jobs of a name can meet."""
    if kind == "folder":
        yield lambda job="job": str(folder / job)
        return
    if kind == "etcd" and not has_etcd():
        pytest.skip("etcd or its client is not installed")
    server = Served(folder) if kind == "tcp" else Etcd(folder)
    try:
        yield server.where
    finally:
        server.stop()


@contextlib.contextmanager
def answering(text: bytes) -> Iterator[str]:
    """`host:port` of what says that it is etcd, and answers every request with the same text."""

    class Same(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(b'{"etcdserver": "3.5.0"}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._say(text)

        def _say(self, said: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Same) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
