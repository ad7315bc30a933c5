"""Strangers: whoever reaches a port of a rank, and is not one of the job.

They send noise, messages that never end, wrong passwords, nothing at all, or come in hundreds; each within a bound, so
that the machine they share with the job is not the victim.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.faults.signals import ENGINES, TRAINED
from benchmarks.chaos.judge import WRONG, Verdict, judge
from benchmarks.chaos.launch import Running
from benchmarks.chaos.promises import of_pause
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Skipped, Stage

MOST_NBYTES = 200 << 20  # twice the 128 strangers of a megabyte each of docs/reference/engines.md
MOST_PORTS = 4  # that are attacked in one scenario
FLOOD_S = 2.0
Held = contextlib.ExitStack
Attack = Callable[[int, random.Random, Held], None]


def ports_of(pid: int) -> set[int]:
    """The TCP ports that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def _connected(port: int, held: Held) -> socket.socket:
    connection = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
    return connection


def _greeted(port: int, mechanism: bytes, held: Held) -> socket.socket:
    """A connection that has said and heard the greeting of ZMTP 3."""
    connection = _connected(port, held)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32))
    connection.recv(64)
    return connection


def noise(port: int, chance: random.Random, held: Held) -> None:
    """Random bytes, a few of which look like a length."""
    _connected(port, held).sendall(chance.randbytes(chance.choice([1, 8, 64, 4096, 65536])))


def silence(port: int, chance: random.Random, held: Held) -> None:
    """A connection on which nothing is ever said."""
    _connected(port, held)


def unfinished(port: int, chance: random.Random, held: Held) -> None:
    """A message of ZeroMQ of many parts, each announcing one more."""
    connection = _greeted(port, chance.choice([b"NULL", b"PLAIN"]), held)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    part = b"\x03" + struct.pack(">Q", 1_000_000) + bytes(1_000_000)
    for _ in range(300):
        connection.sendall(part)


def wrong_password(port: int, chance: random.Random, held: Held) -> None:
    """A peer of ZeroMQ with a password, or a key, that it made up."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    held.callback(context.destroy, linger=0)
    for number in range(10):
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)  # nobody takes what it sends
        sock.setsockopt(zmq.ROUTING_ID, bytes([1, *chance.randbytes(15)]))
        if number % 2:
            sock.setsockopt(zmq.PLAIN_USERNAME, b"rank")
            sock.setsockopt(zmq.PLAIN_PASSWORD, chance.randbytes(16).hex().encode())
        else:
            public, secret = zmq.curve_keypair()
            for option, value in ((zmq.CURVE_SERVERKEY, public), (zmq.CURVE_PUBLICKEY, public)):
                sock.setsockopt(option, value)
            sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
        sock.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(5):
            sock.send(chance.randbytes(200))


def flood(port: int, chance: random.Random, held: Held) -> None:
    """Hundreds of connections, each of which says a little and stays."""
    ends = time.monotonic() + FLOOD_S
    for _ in range(300):
        with contextlib.suppress(OSError):
            _connected(port, held).sendall(chance.randbytes(16))
        if time.monotonic() > ends:
            return


ATTACKS: tuple[Attack, ...] = (noise, silence, unfinished, wrong_password, flood)


class Stranger:
    """Attacks on the ports of all ranks, while the job trains."""

    name = "stranger"
    doors: tuple[str, ...] = TRAINED
    engines: tuple[str, ...] = ENGINES

    def phases(self, door: Door) -> Sequence[str]:
        return ["batch"]

    def absent(self) -> str:
        return "" if Path("/proc/self/net/tcp").exists() else "ports are found in /proc, which this system has not"

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        if scenario.engine == "threads" and scenario.door != "distribute":
            raise Skipped("threads listen on no port, unless their mode has servers or gossips")
        promise = of_pause(scenario, stage.clean(scenario))
        task, chance = stage.task(scenario, pace_s=0.05), scenario.chance
        with stage.start(task) as running, Held() as held:
            stage.reach(running, 0, 3)
            before = resident(running)
            attacked = self._attack(running, chance, held)
            grown = {rank: nbytes - before[rank] for rank, nbytes in resident(running).items()}
            endings = running.endings(range(task.ranks), stage.limit_s(task))
        if not attacked:
            raise Skipped(f"ranks of '{scenario.engine}' listen on no port with this mode")
        if max(grown.values(), default=0) > MOST_NBYTES:
            return Verdict(WRONG, f"strangers hold memory of ranks, in bytes: {grown}, after {', '.join(attacked)}")
        verdict = judge(promise, endings)
        return Verdict(verdict.column, f"{verdict.why} after {', '.join(attacked)}" if verdict.why else "")

    def _attack(self, running: Running, chance: random.Random, held: Held) -> list[str]:
        """Two attacks on each of some ports; what was done."""
        pids = {pid for rank in range(running.task.ranks) if (pid := running.pid(rank)) is not None}
        found = sorted({port for pid in pids for port in ports_of(pid)})
        ports = chance.sample(found, min(MOST_PORTS, len(found)))
        chosen = chance.sample(ATTACKS, 2)
        for attack in chosen:
            for port in ports:
                with contextlib.suppress(OSError):  # whoever cuts a stranger off does right
                    attack(port, chance, held)
        return [attack.__name__ for attack in chosen] if ports else []


def resident(running: Running) -> dict[int, int]:
    """The memory that each rank's process holds."""
    found = {}
    for rank in range(running.task.ranks):
        with contextlib.suppress(OSError, TypeError):
            pages = int(Path(f"/proc/{running.pid(rank)}/statm").read_text().split()[1])
            found[rank] = pages * resource.getpagesize()
    return found
