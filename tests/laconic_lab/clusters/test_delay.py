"""Links with latency, jitter and loss: packets take as long as was asked for, in order, and some never arrive."""

from __future__ import annotations

import os
import random
import shutil
import socket
import statistics
import sys
import time

import pytest

from laconic_lab.clusters.cluster import Cluster
from laconic_lab.clusters.delay import Delay, _Way

needs_tun = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or os.geteuid() != 0
    or not (shutil.which("ip") and shutil.which("tc") and os.path.exists("/dev/net/tun")),
    reason="links with a latency need root on Linux with ip, tc and TUN devices",
)
PORT = 5001


def round_trips(target: str, count: int) -> list[float]:
    """Seconds from sending a datagram to its answer; the rank that has the address answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.settimeout(20)
        if os.environ["LACONIC_BIND"] == target:
            line.bind((target, PORT))
            for _ in range(count):
                line.sendto(*line.recvfrom(64))
            return []
        if int(os.environ["RANK"]) != 0:
            return []
        found = []
        for _ in range(count):
            begun = time.monotonic()
            while True:  # until the other has bound its socket, nobody answers
                line.settimeout(2)
                line.sendto(b"here", (target, PORT))
                try:
                    line.recvfrom(64)
                    break
                except (TimeoutError, ConnectionRefusedError):
                    begun = time.monotonic()
            found.append(time.monotonic() - begun)
        return found


def datagrams(count: int) -> list[int]:
    """The numbers of the datagrams that rank 1 got from rank 0, in the order they came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        if os.environ["RANK"] == "1":
            line.bind(("10.77.0.2", PORT))
            line.settimeout(20)
            found = []
            while (number := int(line.recv(64))) >= 0:
                found.append(number)
            return found
        time.sleep(1)  # until the other has bound its socket
        for number in range(count):
            line.sendto(str(number).encode(), ("10.77.0.2", PORT))
            time.sleep(0.001)
        for _ in range(20):  # the end may be lost, too
            line.sendto(b"-1", ("10.77.0.2", PORT))
        return []


@needs_tun
@pytest.mark.processes
@pytest.mark.parametrize(
    ("hosts", "link", "between", "target", "least_s"),
    [
        (2, "100mbit,20ms", None, "10.77.0.2", 0.040),
        (2, "unlimited,20ms", None, "10.77.0.2", 0.040),
        (3, "100mbit,5ms", "20mbit,15ms", "10.77.0.3", 0.040),  # the third host is the second site
        (3, "100mbit,5ms", "20mbit,400ms", "10.77.0.2", 0.010),
    ],
    ids=["a link", "without a rate", "between sites", "inside a site"],
)
def test_a_round_trip_takes_two_latencies(
    hosts: int, link: str, between: str | None, target: str, least_s: float
) -> None:
    with Cluster(hosts, link, between) as cluster:
        found = cluster.run(round_trips, (target, 9), timeout_s=60)[0]
    assert len(found) == 9
    assert least_s <= min(found)
    assert statistics.median(found) < least_s + 0.3  # not the other link's


@needs_tun
@pytest.mark.processes
def test_packets_are_lost_and_the_others_keep_their_order() -> None:
    with Cluster(2, "10mbit,10ms,9ms,20%") as cluster:
        found = cluster.run(datagrams, (300,), timeout_s=60)[1]
    assert found == sorted(set(found))
    assert 180 < len(found) < 290  # 240 are expected; 3.5 and more standard deviations on either side


def test_jitter_varies_the_delay_and_keeps_the_order() -> None:
    way, read, write = _Way(Delay(0.010, 0.005), random.Random(0)), *os.pipe()
    due = []
    for number in range(100):
        way.take(bytes([number]), now_s=number * 0.001)
    for tick in range(0, 200):
        way.give(write, now_s=tick * 0.001)
        os.set_blocking(read, False)
        try:
            due += [(number, tick) for number in os.read(read, 1000)]
        except BlockingIOError:
            continue
    os.close(read), os.close(write)
    assert [number for number, _ in due] == list(range(100))
    waited = [tick - number for number, tick in due]
    assert min(waited) >= 5
    assert max(waited) <= 16
    assert len(set(waited)) > 3


def test_one_way_after_the_other_adds_up() -> None:
    assert Delay(0.01, 0.001, 0.5) + Delay(0.02, 0.002, 0.5) == Delay(0.03, 0.003, 0.75)
    assert not Delay()
    assert Delay(loss=0.1)
