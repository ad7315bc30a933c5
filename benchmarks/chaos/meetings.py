"""Meeting places of elastic jobs as real processes on a host of a cluster: a folder, etcd, `laconic meet`, a relay.

Caller: `faults/meeting.py`, which takes them away and brings them back. What is left is ended with the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos.disks import fill, small_disk
from laconic.transports.zeromq_keys import KEY_VARIABLE
from laconic_lab.clusters.cluster import Cluster

START_S = 60.0
MEET_PORT, RELAY_PORT, ETCD_PORT, PEER_PORT = 29600, 29601, 2379, 2380
AWAY = ("kill", "stop", "cut")


class Server:
    """A process on a host, which listens at a port there once it is ready."""

    def __init__(self, cluster: Cluster, host: int, port: int, words: Sequence[str], log: Path, key: str = "") -> None:
        self._cluster, self._host, self._port, self._words, self._log = cluster, host, port, words, log
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **({KEY_VARIABLE: key} if key else {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, for the first time or again."""
        with open(self._log, "ab") as log:

            def begin() -> subprocess.Popen[bytes]:
                return subprocess.Popen(self._words, stdout=log, stderr=log, env=self._environment)

            self._process = self._cluster.inside(self._host, begin)

    def ready(self) -> None:
        """Wait until it listens."""
        deadline = time.monotonic() + START_S
        while not self._cluster.inside(self._host, self._listens):
            if time.monotonic() > deadline or (self._process is not None and self._process.poll() is not None):
                raise RuntimeError(f"{self._words[:4]} did not start: {self._log.read_text()[-400:]}")
            time.sleep(0.05)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self._cluster.address(self._host), self._port), 1):
            return True
        return False

    def send(self, number: int) -> None:
        """A signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """End it; safe to call twice."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


def meet(cluster: Cluster, host: int, folder: Path, key: str, *, relays: bool) -> Server:
    """A `laconic meet`."""
    words = [sys.executable, "-m", "laconic", "meet", "--host", cluster.address(host), "--port", str(MEET_PORT)]
    words += ["--folder", str(folder / "meet"), *(["--relay", str(RELAY_PORT)] if relays else [])]
    return Server(cluster, host, MEET_PORT, words, folder / "meet.log", key)


def etcds(cluster: Cluster, hosts: Sequence[int], folder: Path) -> list[Server]:
    """An etcd with a member on each of these hosts."""
    peers = {host: f"http://{cluster.address(host)}:{PEER_PORT}" for host in hosts}
    everyone, servers = ",".join(f"m{host}={url}" for host, url in peers.items()), []
    for host, peer in peers.items():
        client = f"http://{cluster.address(host)}:{ETCD_PORT}"
        words = ["etcd", "--name", f"m{host}", "--data-dir", str(folder / f"etcd{host}"),
                 "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
                 "--initial-advertise-peer-urls", peer, "--initial-cluster", everyone]  # fmt: skip
        servers.append(Server(cluster, host, ETCD_PORT, words, folder / f"etcd{host}.log"))
    return servers


class Place:
    """The meeting place of one job; a context manager.

    Args:
        kind: folder, etcd or tcp.
        hosts: where it runs; of several, etcd has a member on each, and the others are on the first.
        relays: there is a relay on the first of them, too.

    Attributes:
        where: as `laconic.elastic` names it.
        environment: what a member needs to know.
    """

    def __init__(
        self, kind: str, cluster: Cluster, hosts: Sequence[int], folder: Path, key: str, *, relays: bool
    ) -> None:
        self.kind, self._cluster, self._hosts, self._disk = kind, cluster, hosts, folder / "shared"
        self._servers: list[Server] = []
        addresses = [cluster.address(host) for host in hosts]
        self.where = {
            "folder": str(self._disk / "share" / "job"),
            "tcp": f"tcp://{addresses[0]}:{MEET_PORT}/job",
            "etcd": f"etcd://{','.join(f'{each}:{ETCD_PORT}' for each in addresses)}/job",
        }[kind]
        self.environment = {KEY_VARIABLE: key}
        if relays:
            self.environment["LACONIC_RELAY"] = f"{addresses[0]}:{RELAY_PORT}"
        if kind == "tcp" or relays:
            self._servers.append(meet(cluster, hosts[0], folder, key, relays=relays))
        if kind == "etcd":
            self._servers += etcds(cluster, hosts, folder)
        self._restores: Callable[[], None] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Place:
        with contextlib.ExitStack() as stack:
            if self.kind == "folder":
                stack.enter_context(small_disk(self._disk))
                (self._disk / "share").mkdir()
            for server in self._servers:
                stack.callback(server.end)
                server.start()
            for server in self._servers:
                server.ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def leave(self, how: str) -> None:
        """Take it away: `kill` or `stop` its processes, or `cut` its host off.

        A folder has no process: it is full, or, cut off, something else is in its place.
        """
        if how == "cut":
            for host in self._hosts:
                self._cluster.plug(host, connected=False)
        else:
            for server in self._servers:
                server.send(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if self.kind == "folder":
            self._spoil(how)

    def _spoil(self, how: str) -> None:
        if how == "cut":
            share, away = self._disk / "share", self._disk / "away"
            share.rename(away)
            share.touch()

            def restore() -> None:
                away.rename(share.with_suffix(".back"))
                share.unlink()
                share.with_suffix(".back").rename(share)

            self._restores = restore
        else:
            self._restores = fill(self._disk).unlink

    def come_back(self, how: str) -> None:
        """Bring it back, as it was."""
        if self._restores is not None:
            self._restores()
        if how == "cut":
            for host in self._hosts:
                self._cluster.plug(host, connected=True)
        for server in self._servers if how == "kill" else ():
            server.end()
            server.start()
        for server in self._servers if how == "stop" else ():
            server.send(signal.SIGCONT)
