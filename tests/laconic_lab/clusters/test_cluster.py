"""Emulated clusters with real ranks: right results, a limit that is really there, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.errors import BadInput
from laconic.transports.launcher import LocalJob, RankFailed
from laconic_lab.clusters import cluster as cluster_module
from laconic_lab.clusters.cluster import Cluster, emulated

pytestmark = pytest.mark.processes
needs_root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="emulated clusters need root on Linux with ip and tc",
)
NUMEL = 1_310_720  # 5 MiB of float32


def all_reduced() -> tuple[list[float], str, str]:
    with laconic.init(timeout_s=20) as world:
        total = laconic.all_reduce(torch.full((1000,), float(world.rank + 1)), algorithm="ring", group=world)
        return total.unique().tolist(), world.engine, str(sorted(name for _, name in socket.if_nameindex()))


def torch_all_reduced() -> float:
    dist.init_process_group("gloo")
    value = torch.full((10,), float(dist.get_rank() + 1))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return float(value[0])


def seconds_to_send(source: int, target: int) -> float:
    """How long the target waits for 5 MiB from the source, after a first exchange of one value."""
    dist.init_process_group("gloo")
    taken = 0.0
    for numel in (1, NUMEL):
        dist.barrier()
        begun = time.perf_counter()
        if dist.get_rank() == source:
            dist.send(torch.ones(numel), target)
        if dist.get_rank() == target:
            values = torch.zeros(numel)
            dist.recv(values, source)
            assert bool((values == 1).all())
        taken = time.perf_counter() - begun
    dist.barrier()
    dist.destroy_process_group()
    return taken


def place() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "LACONIC_BIND"))


def raise_on_two() -> None:
    if os.environ["RANK"] == "2":
        raise ValueError("rank two says no")
    time.sleep(60)


def networks_of(process: int | str = "self") -> set[str]:
    """The network namespaces that a process holds by descriptor, as 'net:[4026532242]'."""
    found = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("net:["):
            found.add(target)
    return found


def processes_with(networks: set[str]) -> list[int]:
    """Processes that are in one of the namespaces or hold one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns/net") in networks or networks_of(folder.name) & networks:
                found.append(int(folder.name))
        except OSError:
            continue  # it ended while we looked
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The machine's interfaces and our descriptors are as before."""
    interfaces, held = socket.if_nameindex(), networks_of()
    yield
    assert socket.if_nameindex() == interfaces
    assert networks_of() == held


@needs_root
@pytest.mark.parametrize("engine", ["gloo", "zmq"])
def test_all_reduce_is_right_and_stays_inside_the_namespaces(engine: str, nothing_left: None) -> None:
    with Cluster(hosts=3, link="1gbit") as cluster:
        results = cluster.run(all_reduced, environment={"LACONIC_ENGINE": engine}, timeout_s=40)
    assert results == [([6.0], engine, "['laconic0', 'lo']")] * 3


@needs_root
def test_torch_distributed_and_two_ranks_per_host() -> None:
    with Cluster(hosts=2, link="unlimited") as cluster:
        assert cluster.run(torch_all_reduced, ranks_per_host=2, timeout_s=40) == [10.0] * 4
        assert cluster.run(place, ranks_per_host=2, timeout_s=40) == [
            ("0", "0", "2", "0", "10.77.0.1"),
            ("1", "1", "2", "0", "10.77.0.1"),
            ("2", "0", "2", "1", "10.77.0.2"),
            ("3", "1", "2", "1", "10.77.0.2"),
        ]


@needs_root
@pytest.mark.parametrize(
    ("link", "between", "hosts", "source", "target"),
    [("100mbit", None, 2, 0, 1), ("unlimited", "100mbit", 3, 2, 0), ("100mbit,5ms", None, 2, 0, 1)],
    ids=["every host's link", "between sites", "with a delay"],
)
def test_a_transfer_takes_as_long_as_the_link_needs(
    link: str, between: str | None, hosts: int, source: int, target: int
) -> None:
    with Cluster(hosts, link, between) as cluster:
        taken = cluster.run(seconds_to_send, (source, target), timeout_s=40)[target]
    assert taken >= 0.8 * 4 * NUMEL * 8 / 100e6


def congestion_control(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=10) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@needs_root
def test_tcp_is_the_same_on_every_machine() -> None:
    with Cluster(hosts=1, link="unlimited") as cluster:
        store = cluster.new_store()
        found = cluster.run(congestion_control, (store.host, store.port), timeout_s=40)
    assert found == [cluster_module._congestion_control()]


@needs_root
def test_hosts_of_one_site_do_not_feel_the_link_between_sites() -> None:
    with Cluster(hosts=3, link="unlimited", between="1mbit") as cluster:
        taken = cluster.run(seconds_to_send, (0, 1), timeout_s=40)[1]
    assert taken < 0.8 * 4 * NUMEL * 8 / 1e6  # 33 s through the slow link


@needs_root
def test_the_error_of_a_rank_arrives_and_nothing_is_left(nothing_left: None) -> None:
    with Cluster(hosts=3) as cluster:
        networks = networks_of()
        with pytest.raises(RankFailed, match="rank two says no"):
            cluster.run(raise_on_two, timeout_s=40)
    assert processes_with(networks) == []


@needs_root
def test_jobs_that_have_ended_hold_nothing() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Cluster(hosts=1, link="unlimited") as cluster:
        counts = []
        for _ in range(3):
            cluster.start_on(0, abs, (-1,)).results(timeout_s=60)
            counts.append(held())
    assert counts[2] <= counts[1]


@needs_root
def test_ranks_still_running_end_with_the_cluster_when_its_block_fails(nothing_left: None) -> None:
    cluster = Cluster(hosts=2)

    def fail() -> None:
        with cluster:
            started.append(cluster.start(time.sleep, (300,)))
            networks.update(networks_of())
            raise KeyError("the block fails")

    started: list[LocalJob[None]] = []
    networks: set[str] = set()
    with pytest.raises(KeyError, match="the block fails"):
        fail()
    assert len(networks) == 3
    assert not any(process.is_alive() for process in started[0].processes)
    assert processes_with(networks) == []


@needs_root
def test_nothing_outlives_a_killed_owner(nothing_left: None) -> None:
    program = """
        import time
        from laconic_lab.clusters.cluster import Cluster
        if __name__ == "__main__":
            with Cluster(hosts=2, link="1gbit,1ms") as cluster:
                job = cluster.start(time.sleep, (300,))
                forwarders = [each.pid for each in cluster.forwarders]
                print(*forwarders, flush=True)
                print("ready", *[process.pid for process in job.processes], flush=True)
                time.sleep(300)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        forwarders = owner.stdout.readline().split()
        ready, *ranks = owner.stdout.readline().split()
        assert ready == "ready"
        networks = networks_of(owner.pid)
        assert len(networks) == 3  # two hosts and the switch
        deadline = time.monotonic() + 30
        while len(processes_with(networks)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)  # until the ranks have entered
        assert set(processes_with(networks)) == {owner.pid, *map(int, ranks)}
        owner.kill()
        owner.wait(timeout=10)
    deadline = time.monotonic() + 10
    while (processes_with(networks) or _alive(forwarders)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(networks) == []
    assert len(forwarders) == 2
    assert not _alive(forwarders)


def _alive(processes: list[str]) -> list[str]:
    return [each for each in processes if _command_of(each)]


def _command_of(process: str) -> bytes:
    """Empty of one that has ended, and is not yet waited for."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def test_a_cluster_that_cannot_be_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.sys, "platform", "linux")
    monkeypatch.setattr(cluster_module.os, "geteuid", lambda: 1000)
    with pytest.raises(BadInput, match=r"needs root \(try sudo\); `laconic plan`"):
        Cluster()
    monkeypatch.setattr(cluster_module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(cluster_module.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(BadInput, match=r"needs tc \(package iproute2\); `laconic plan`"):
        Cluster()
    monkeypatch.setattr(cluster_module.sys, "platform", "darwin")
    with pytest.raises(BadInput, match=r"needs Linux, this is darwin; `laconic plan`"):
        Cluster()


@pytest.mark.parametrize(
    "text",
    ["", "fast", "1gbit,", "-1gbit", "0mbit", "1 gbit;reboot", "1kbit", "1gbit,1ms,2ms", "1gbit,1ms,0ms,100%",
     "1gbit,1ms,0ms,1%,1", "unlimited,-1ms"],
)  # fmt: skip
def test_a_link_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="link"):
        emulated(text)


def test_a_second_rate_is_refused_with_the_option_for_it() -> None:
    with pytest.raises(BadInput, match="--between"):
        emulated("1gbit,100mbit")


@pytest.mark.parametrize(("hosts", "between"), [(0, None), (65, None), (1, "1mbit")])
def test_wrong_numbers_of_hosts_are_refused(hosts: int, between: str | None) -> None:
    with pytest.raises(BadInput, match="hosts"):
        Cluster(hosts, "1gbit", between)


@needs_root
def test_a_refused_command_names_itself(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "INTERFACE", "a-name-longer-than-fifteen")
    with pytest.raises(BadInput, match=r"`ip link add port0 .*a-name-longer"), Cluster(hosts=1):
        pass


def answers(address: str) -> str:
    """What a connection to port 5000 of an address comes to."""
    try:
        with socket.create_connection((address, 5000), 5) as connection:
            return connection.recv(64).decode()
    except OSError as error:
        return type(error).__name__


@needs_root
@pytest.mark.skipif(not shutil.which("iptables"), reason="routers that masquerade need iptables")
@pytest.mark.parametrize("link", ["unlimited", "unlimited,5ms"])
def test_hosts_behind_routers_reach_out_and_nobody_reaches_them(link: str) -> None:
    serve = (
        "import socket; listening = socket.create_server(('', 5000)); print(flush=True)\n"
        "while True:\n    peer, (host, _) = listening.accept(); peer.sendall(host.encode()); peer.close()"
    )
    with Cluster(3, link, routed=2) as cluster:
        servers = [
            cluster.inside(host, lambda: subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE))
            for host in range(3)
        ]
        try:
            for server in servers:
                assert server.stdout is not None
                server.stdout.readline()
            seen = [cluster.inside(host, lambda: answers(cluster.address(2))) for host in (0, 1)]
            assert seen == [cluster.address(0), cluster.address(1)], "the router's address"
            assert cluster.inside(2, lambda: answers(cluster.address(0))) == "ConnectionRefusedError"
            assert cluster.inside(1, lambda: answers(cluster.address(0))) == "ConnectionRefusedError"
        finally:
            for server in servers:
                server.kill()
                server.communicate()
