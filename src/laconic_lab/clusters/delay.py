"""Delay an emulated host's packets in user space, because few machines have the kernel's netem.

Callers: `cluster.py` starts one process a host. The host sends into a TUN device, whose kernel queue keeps the link's
rate. This process reads the packets, keeps each for the link's latency, loses some if the link does, and hands them to
the switch, which routes them on. What a host receives does not come this way, so each packet is handled once. Packets
keep their order, as on a real path: jitter varies the delay, but no packet overtakes another on the same way.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
_BATCH = 64  # packets that are read before due ones are sent
_MOST_NBYTES = 65536
_DESTINATION = slice(16, 20)  # of an IPv4 header


@dataclass(frozen=True)
class Delay:
    """One-way latency, its jitter, and the share of packets lost."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.latency_s or self.jitter_s or self.loss)

    def __add__(self, other: Delay) -> Delay:
        """One way after the other."""
        loss = 1 - (1 - self.loss) * (1 - other.loss)
        return Delay(self.latency_s + other.latency_s, self.jitter_s + other.jitter_s, loss)


def open_tun(name: str) -> int:
    """A descriptor of a new TUN device in the calling thread's namespace; the device goes when it is closed.

    Raises:
        OSError: the system has no TUN devices, or does not let us make one.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def start(
    source: int, sink: int, ways: Sequence[Delay], way_of: Mapping[str, int], seed: int
) -> subprocess.Popen[bytes]:
    """Start a process that moves packets from one TUN device to another until its standard input is closed.

    Args:
        source, sink: descriptors of the devices.
        ways: the delays there are; packets of one way keep their order.
        way_of: for a destination's address the number of its way; others take the first.
        seed: of jitter and loss.
    """
    given = {"ways": [asdict(each) for each in ways], "way_of": dict(way_of), "seed": seed}
    return subprocess.Popen(
        [sys.executable, "-m", "laconic_lab.clusters.delay", str(source), str(sink), json.dumps(given)],
        stdin=subprocess.PIPE,
        pass_fds=(source, sink),
    )


class _Way:
    """Packets on their way, each with the time at which it is due."""

    def __init__(self, delay: Delay, chance: random.Random) -> None:
        self._delay, self._chance = delay, chance
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._last_s = 0.0

    def take(self, packet: bytes, now_s: float) -> None:
        """Keep a packet, or lose it."""
        delay = self._delay
        if delay.loss and self._chance.random() < delay.loss:
            return
        due_s = now_s + delay.latency_s
        if delay.jitter_s:
            due_s += self._chance.uniform(-1, 1) * delay.jitter_s
        self._last_s = max(self._last_s, due_s)
        self._waiting.append((self._last_s, packet))

    @property
    def due_s(self) -> float | None:
        """When the next packet is due, if there is one."""
        return self._waiting[0][0] if self._waiting else None

    def give(self, sink: int, now_s: float) -> None:
        """Send the packets that are due."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= now_s:
            _send(sink, waiting.popleft()[1])


def _send(sink: int, packet: bytes) -> None:
    try:
        os.write(sink, packet)
    except OSError:  # a full queue, or a device that was taken down, loses packets
        return


def _forward(source: int, sink: int, ways: Sequence[_Way], way_of: Mapping[bytes, int]) -> None:
    """Move packets until standard input ends."""
    alive = sys.stdin.fileno()
    while True:
        due = min((way.due_s for way in ways if way.due_s is not None), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select([source, alive], [], [], wait_s)
        if alive in readable:
            return
        now_s = time.monotonic()
        if readable:
            _read(source, ways, way_of, now_s)
        for way in ways:
            way.give(sink, now_s)


def _read(source: int, ways: Sequence[_Way], way_of: Mapping[bytes, int], now_s: float) -> None:
    for _ in range(_BATCH):
        try:
            packet = os.read(source, _MOST_NBYTES)
        except BlockingIOError:
            return
        ways[way_of.get(packet[_DESTINATION], 0)].take(packet, now_s)


def _main() -> None:
    source, sink, given = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    chance = random.Random(given["seed"])
    ways = [_Way(Delay(**each), chance) for each in given["ways"]]
    way_of = {bytes(map(int, address.split("."))): way for address, way in given["way_of"].items()}
    _forward(source, sink, ways, way_of)


if __name__ == "__main__":
    _main()
