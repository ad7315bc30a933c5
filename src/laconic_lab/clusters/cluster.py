"""Emulated clusters: hosts are network namespaces of this machine, joined by links of a given speed.

Callers: `train`, `compare` and the benchmarks with `--link`. Real processes, real TCP, real engines; only the wire is
emulated, and all hosts share this machine's cores. Nothing is added to the machine's own network: hosts, links and
switch live in namespaces that the kernel removes together with the last process that uses them (see
`transports/namespace.py`), so that nothing is left behind however the owner ends.

    host 0 [rate]── port0 ┐                        ┌ port2 ──[rate] host 2
                          site0 ──[rate between]── site1              without a link between there is one site
    host 1 [rate]── port1 ┘                        └ port3 ──[rate] host 3

Where links have a latency, a host sends through a TUN device and a process that delays its packets (`delay.py`):

    host 0 delay0 ── process ── delay0 of the switch, which routes to site0;  what it receives comes by port0, as above

A host that is `routed` is a router, and its ranks run in a namespace behind it (`routers.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from laconic.errors import BadInput
from laconic.schedules.link import Link
from laconic.transports import namespace
from laconic.transports.launcher import Host, LocalJob
from laconic.transports.rendezvous import new_store
from laconic_lab.clusters import delay, routers
from laconic_lab.clusters.delay import Delay

T = TypeVar("T")

INTERFACE = "laconic0"  # every host's; a name of its own, since /sys still shows the machine's interfaces
_DELAYED = "delay"  # what a host with a delay sends by
MAX_HOSTS = 64
_LEAST_BPS, _MOST_BPS = 1e5, 1e12
_FRAME_NBYTES = 1514  # Ethernet's largest frame without its checksum, as tbf counts it
_MAX_SEGMENT_NBYTES = 65536
_LARGEST_MTU = 9000  # of hosts with a delay: each packet costs a process time
# A bucket of 1 ms is the smallest that lets TCP fill the link (94 to 96 % goodput at 0.1 and 1 Gbit/s with all cores
# busy; half of it reaches 60 % at 1 Gbit/s, since a late timer loses what does not fit). An idle link thus lets the
# first millisecond of a message pass at once.
_BURST_S = 1e-3
_QUEUE_S = 50e-3  # how much a port holds back before it drops
_NETWORK = "10.77.0.0/16"
_HALVES = ("10.77.0.0/17", "10.77.128.0/17")  # more specific than the network itself
_CURE = "`laconic plan` predicts a step without one"


def emulated(text: str) -> Link:
    """The link that a text names, as hosts can be joined by; without a latency none is added.

    >>> emulated("100mbit,40ms").rate_bps, emulated("unlimited").latency_s
    (100000000.0, 0.0)

    Raises:
        BadInput: no link, or one that is too slow or too fast.
    """
    link = Link.parse(text, latency_s=0.0)
    if link.rate_bps is not None and not _LEAST_BPS <= round(link.rate_bps) <= _MOST_BPS:
        raise BadInput(f"a link is 'unlimited' or has a rate from 100kbit to 1000gbit, got '{text}'")
    return link


class Cluster:
    """Emulated hosts, each in its own network namespace behind a link of the given speed; a context manager.

    Both directions of every host's link are limited to the rate by a token bucket (`tc tbf`), so a host sends and
    receives at the rate at once, as on a switch with full-duplex ports. Ranks on one host reach each other through its
    loopback, unlimited.

    Args:
        hosts: how many, 1 to 64.
        link: of every host, "1gbit", "100mbit,40ms", "20mbit,40ms,5ms,0.1%", "unlimited": rate, latency one way from
            host to host, jitter and loss. Without a latency none is added.
        between: the same, between two sites of half the hosts each; its latency comes on top.
        routed: so many hosts, the first, are each behind a router of their own that masquerades: they reach the others,
            and nobody reaches them.

    Raises:
        BadInput: not root, not Linux, no `ip` and `tc`, or a value that cannot be used.

    Example::

        with Cluster(hosts=4, link="100mbit") as cluster:
            results = cluster.run(train, args=(seed,), timeout_s=60)
    """

    def __init__(self, hosts: int = 4, link: str = "1gbit", between: str | None = None, routed: int = 0) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise BadInput(f"a cluster has 1 to {MAX_HOSTS} hosts, got {hosts}")
        self.link = emulated(link)
        self.between = None if between is None else emulated(between)
        self.sites = 1 if self.between is None else 2
        if self.sites > hosts:
            raise BadInput(f"two sites need at least 2 hosts, got {hosts}")
        _check_machine()
        self.hosts, self.routed = hosts, routed
        self.store_address = "10.77.255.254"
        self._switch = -1
        self._descriptors: list[int] = []
        self._homes: dict[int, int] = {}  # the namespaces behind routers, by host
        self._jobs: list[LocalJob[Any]] = []
        self.forwarders: list[subprocess.Popen[bytes]] = []

    @property
    def slowest_bps(self) -> float | None:
        """The rate of the slowest link between hosts; None where nothing is limited."""
        rates = [each.rate_bps for each in (self.link, self.between) if each is not None]
        return min((rate for rate in rates if rate is not None), default=None)

    def address(self, host: int) -> str:
        """The host's address, seen from the others; of a host behind a router, the router's."""
        return f"10.77.0.{host + 1}"

    def site(self, host: int) -> int:
        """Which site the host belongs to: the first half of the hosts, rounded up, to site 0."""
        return host * self.sites // self.hosts

    def __enter__(self) -> Cluster:
        try:
            self._switch = self._new_namespace()
            self._build_switch()
            for host in range(self.hosts):
                self._connect(host, self._new_namespace())
            for host in range(self.routed):
                self._homes[host] = self._new_namespace()
                routers.connect(self._descriptors[1 + host], self._homes[host], self.address(host), _batch)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the cluster's processes and release it; safe to call twice."""
        for job in self._jobs:
            job.kill()
        self._jobs.clear()
        for forwarder in self.forwarders:
            forwarder.communicate()  # it ends with its standard input
        self.forwarders.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def places(self, ranks_per_host: int = 1) -> list[Host]:
        """Where each rank runs: rank r on host ⌊r / ranks_per_host⌋."""
        if ranks_per_host < 1:
            raise BadInput(f"a host has at least 1 rank, got {ranks_per_host}")
        return [self._host(host) for host in range(self.hosts) for _ in range(ranks_per_host)]

    def new_store(self) -> dist.TCPStore:
        """A store where the ranks of a job meet; it is the switch's, and outlives any rank."""
        self._check_open()
        return namespace.inside(self._switch, lambda: new_store(self.store_address))

    def sent_nbytes(self, host: int) -> int:
        """What a host has sent so far, headers and acknowledgements included."""
        self._check_open()
        return namespace.inside(self._descriptors[1 + host], interface_nbytes)

    def start(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        ranks_per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        hosts: Sequence[int] | None = None,
    ) -> LocalJob[T]:
        """Start the importable `function(*args)` on every host; rank r runs on host ⌊r / ranks_per_host⌋.

        Args:
            hosts: where each rank runs instead.
        """
        places = self.places(ranks_per_host) if hosts is None else [self._host(host) for host in hosts]
        return self._keep(LocalJob(len(places), function, args, environment, store=self.new_store(), hosts=places))

    def start_on(self, host: int, function: Callable[..., T], args: tuple[Any, ...] = ()) -> LocalJob[T]:
        """Start `function(*args)` in one process on one host; it finds the others by itself."""
        return self._keep(LocalJob(1, function, args, hosts=[self._host(host)]))

    def _keep(self, job: LocalJob[T]) -> LocalJob[T]:
        """Remember a job to end it with the cluster, and forget those that have ended: each holds a store and pipes."""
        self._jobs = [each for each in self._jobs if any(process.is_alive() for process in each.processes)]
        self._jobs.append(job)
        return job

    def run(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        ranks_per_host: int = 1,
        timeout_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Every rank's value of `function(*args)`, by rank; see `start`.

        Raises:
            RankFailed: a rank raised, died or was not done in `timeout_s`; all others are then stopped.
        """
        return self.start(function, args, ranks_per_host, environment).results(timeout_s)

    def inside(self, host: int, function: Callable[[], T]) -> T:
        """The value of `function()`, called on a host; what it starts stays there."""
        self._check_open()
        return namespace.inside(self._homes.get(host, self._descriptors[1 + host]), function)

    def plug(self, host: int, *, connected: bool) -> None:
        """Cut the host's link, or restore it; packets under way are lost silently."""
        _batch("ip", self._switch, [f"link set port{host} {'up' if connected else 'down'}"])

    def join_sites(self, *, connected: bool) -> None:
        """Cut the link between two sites, or bring it back; the store stays with the first."""
        if self.between is None:
            raise BadInput("there is one site; between='unlimited' makes two")
        _batch("ip", self._switch, [f"link set between0 {'up' if connected else 'down'}"])

    def _check_open(self) -> None:
        if not self._descriptors:
            raise BadInput("the cluster is not open; use it in a with statement")

    def _host(self, host: int) -> Host:
        self._check_open()
        home = self._homes.get(host)
        environment = {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "LACONIC_BIND": self.address(host) if home is None else routers.ADDRESS,
            "LACONIC_INSECURE": "1",  # nobody else is on this network
        }
        return Host(host, environment, namespace.path_of(self._descriptors[1 + host] if home is None else home))

    def _new_namespace(self) -> int:
        try:
            descriptor = namespace.create()
        except OSError as error:
            raise BadInput(
                f"this system does not let us make network namespaces ({error.strerror}); {_CURE}"
            ) from error
        self._descriptors.append(descriptor)
        return descriptor

    def _build_switch(self) -> None:
        lines = ["link set lo up"]
        for site in range(self.sites):
            lines += [f"link add site{site} type bridge mcast_snooping 0", f"link set site{site} addrgenmode none up"]
        lines.append(f"address add {self.store_address}/16 dev site0")
        if self.between is not None:
            lines.append("link add between0 type veth peer name between1")
            lines += [
                f"link set between{site} mtu {self._mtu} addrgenmode none master site{site} up" for site in (0, 1)
            ]
        _batch("ip", self._switch, lines)
        if self.between is not None:
            for site in (0, 1):
                _limit(self._switch, f"between{site}", self.between.rate_bps)
        if self._delayed:
            _set(self._switch, {"net/ipv4/ip_forward": "1", "net/ipv4/conf/all/rp_filter": "0"})

    def _connect(self, host: int, descriptor: int) -> None:
        port = f"port{host}"
        _batch("ip", self._switch, [
            f"link add {port} mtu {self._mtu} type veth peer name {INTERFACE} mtu {self._mtu} netns "
            f"{namespace.path_of(descriptor)}",
            f"link set {port} addrgenmode none master site{self.site(host)} up",
        ])  # fmt: skip
        _batch("ip", descriptor, [
            "link set lo up",
            f"link set {INTERFACE} addrgenmode none up",
            f"address add {self.address(host)}/16 dev {INTERFACE}",
            f"route replace {_NETWORK} dev {INTERFACE} src {self.address(host)} congctl {_congestion_control()}",
        ])  # fmt: skip
        _limit(self._switch, port, self.link.rate_bps)
        _limit(descriptor, INTERFACE, self.link.rate_bps)
        if self._delayed:
            self._delay(host, descriptor)

    def _delay(self, host: int, descriptor: int) -> None:
        """Send the host's packets through a process that delays them; the switch routes them at the host's site."""
        name, table = f"{_DELAYED}{host}", 100 + self.site(host)
        try:
            ends = [namespace.inside(each, lambda: delay.open_tun(name)) for each in (descriptor, self._switch)]
        except OSError as error:
            raise BadInput(f"a link with a latency needs TUN devices ({error.strerror}); {_CURE}") from error
        try:
            _batch("ip", self._switch, [
                f"link set {name} mtu {self._mtu} addrgenmode none up",
                f"route replace {_NETWORK} dev site{self.site(host)} table {table}",
                f"rule add iif {name} lookup {table}",
            ])  # fmt: skip
            _set(self._switch, {f"net/ipv4/conf/{name}/rp_filter": "0"})
            _batch("ip", descriptor, [
                f"link set {name} mtu {self._mtu} addrgenmode none up",
                *(f"route add {half} dev {name} src {self.address(host)} congctl {_congestion_control()}"
                  for half in _HALVES),
            ])  # fmt: skip
            _set(descriptor, {f"net/ipv4/conf/{each}/rp_filter": "0" for each in ("all", INTERFACE)})
            _limit(descriptor, name, self.link.rate_bps)
            far = [each for each in range(self.hosts) if self.site(each) != self.site(host)]
            addresses = [self.address(each) for each in far] + [self.store_address] * bool(self.site(host))
            near, between = _delay_of(self.link), _delay_of(self.between)
            ways, way_of = (near, near + between), dict.fromkeys(addresses, 1)
            self.forwarders.append(delay.start(ends[0], ends[1], ways, way_of, seed=host))
        finally:
            for end in ends:
                os.close(end)

    @property
    def _delayed(self) -> bool:
        """Whether some packet is delayed, or lost."""
        return bool(_delay_of(self.link) or _delay_of(self.between))

    @property
    def _mtu(self) -> int:
        """The largest packet: Ethernet's, or where each costs a process time, what the link sends in a millisecond."""
        usual = _FRAME_NBYTES - 14
        if not self._delayed:
            return usual
        slowest = self.slowest_bps
        return _LARGEST_MTU if slowest is None else max(usual, min(_LARGEST_MTU, int(slowest / 8 * _BURST_S)))


def _delay_of(link: Link | None) -> Delay:
    return Delay() if link is None else Delay(link.latency_s, link.jitter_s, link.loss)


def interface_nbytes() -> int:
    """What the network interface of the calling thread's host has sent so far.

    Raises:
        BadInput: this is no emulated host.
    """
    rows = (line.partition(":") for line in Path("/proc/thread-self/net/dev").read_text().splitlines())
    counters = {name.strip(): counted.split() for name, _, counted in rows}
    if INTERFACE not in counters:
        raise BadInput(f"there is no interface {INTERFACE}: this rank is not on an emulated host")
    return sum(int(found[8]) for name, found in counters.items() if name == INTERFACE or name.startswith(_DELAYED))


def core_of(host: int) -> int:
    """The core that a pinned host has to itself, as far as there are enough: this process's cores in turn."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[host % len(cores)]


def _check_machine() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not sys.platform.startswith("linux"):
        raise BadInput(f"an emulated cluster needs Linux, this is {sys.platform}; {_CURE}")
    if os.geteuid() != 0:
        raise BadInput(f"an emulated cluster needs root (try sudo); {_CURE}")
    if missing:
        raise BadInput(f"an emulated cluster needs {' and '.join(missing)} (package iproute2); {_CURE}")


def _congestion_control() -> str:
    """The TCP congestion control: Linux's default, whatever this machine uses.

    With BBR, some machines' default, exchanges with pauses between them take up to 15 % longer, and vary more.
    """
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return "cubic" if known.exists() and "cubic" in known.read_text().split() else "reno"  # every kernel has it


def _limit(descriptor: int, interface: str, rate_bps: float | None) -> None:
    """Limit the outgoing rate of `interface`; None leaves it unlimited."""
    if rate_bps is None:
        return
    burst_nbytes = int(rate_bps / 8 * _BURST_S)
    # Segments larger than the bucket would be cut up by tbf, which costs more than the transfer itself.
    segment_nbytes = min(_MAX_SEGMENT_NBYTES, max(_FRAME_NBYTES, burst_nbytes))
    queue_nbytes = int(rate_bps / 8 * _QUEUE_S) + burst_nbytes + _MAX_SEGMENT_NBYTES
    _batch("ip", descriptor, [f"link set {interface} gso_max_size {segment_nbytes}"])
    bucket = f"rate {rate_bps:.0f}bit burst {burst_nbytes + _FRAME_NBYTES} limit {queue_nbytes}"
    _batch("tc", descriptor, [f"qdisc add dev {interface} root tbf {bucket}"])


def _set(descriptor: int, values: Mapping[str, str]) -> None:
    """Set the kernel's options of a namespace."""

    def write() -> None:
        for name, value in values.items():
            Path("/proc/sys", name).write_text(value)

    namespace.inside(descriptor, write)


def _batch(tool: str, descriptor: int, lines: Sequence[str]) -> None:
    """Run lines of `ip` or `tc` inside a namespace."""
    text = "\n".join(lines) + "\n"
    done = namespace.inside(
        descriptor, lambda: subprocess.run([tool, "-batch", "-"], input=text, text=True, capture_output=True)
    )
    if done.returncode:
        # the tools name the line that failed, as "Command failed -:2"
        line = re.search(r"-:(\d+)", done.stderr)
        command = lines[int(line[1]) - 1] if line else "; ".join(lines)
        raise BadInput(f"`{tool} {command}` failed: {done.stderr.splitlines()[0] if done.stderr else ''}; {_CURE}")
