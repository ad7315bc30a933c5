"""Members that reach a relay, and not each other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import laconic
from laconic.consistency.elastic.line import RELAY_VARIABLE
from laconic.consistency.elastic.places.server import meeting_secret
from laconic.transports.relay import RelayServer
from laconic.transports.zeromq_keys import KEY_VARIABLE, new_key
from tests.consistency.elastic.places import Served
from tests.consistency.elastic.trainers import Trainer, assert_alike, until

PORT, RELAY = 29600, 29601


@pytest.mark.usefixtures("one_thread")
def test_members_train_through_a_relay_and_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = RelayServer("127.0.0.1", 0, meeting_secret(None, "127.0.0.1").key)
    monkeypatch.setenv(RELAY_VARIABLE, f"127.0.0.1:{relay.port}")
    place = Served(tmp_path)
    workers = [Trainer(place.where(), leave, workers=3, data=laconic.Samples(256, 32, 8)) for leave in (15, None, None)]
    until(lambda: relay._streams > 0)
    for worker in workers:
        worker.ended()
    assert_alike(workers[1:])
    assert max(workers[1].digests) == 64
    place.stop()
    relay.close()


class Apart:
    """Two hosts that reach a third, and not each other: namespaces without forwarding between them."""

    def __init__(self) -> None:
        self.tag = f"lr{os.getpid() % 100000}"
        self.hub, self.hosts = f"{self.tag}-hub", [f"{self.tag}-a", f"{self.tag}-b"]

    def __enter__(self) -> Apart:
        for name in (self.hub, *self.hosts):
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        for number, host in enumerate(self.hosts, 1):
            inner, outer = f"{self.tag}i{number}", f"{self.tag}o{number}"
            self._ip("link", "add", inner, "netns", host, "type", "veth", "peer", "name", outer, "netns", self.hub)
            for name, link, last in ((host, inner, 2), (self.hub, outer, 1)):
                self._ip("-n", name, "addr", "add", f"10.78.{number}.{last}/24", "dev", link)
                self._ip("-n", name, "link", "set", link, "up")
            self._ip("-n", host, "route", "add", "default", "via", f"10.78.{number}.1")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.hub, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, host: str, *words: str, **variables: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", host, sys.executable, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, **variables})  # fmt: skip

    def _ip(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this system does not let us make hosts: {done.stderr.strip()}")


class BehindRouters(Apart):
    """Two hosts with the same private address, each behind a router of its own that masquerades."""

    PRIVATE = "192.168.7"

    def __init__(self) -> None:
        super().__init__()
        self.routers = [f"{self.tag}-ra", f"{self.tag}-rb"]

    def __enter__(self) -> BehindRouters:
        outside, self.hosts = self.hosts, self.routers
        super().__enter__()
        self.hosts = outside
        for number, (host, router) in enumerate(zip(self.hosts, self.routers, strict=True), 1):
            self._ip("netns", "add", host)
            self._ip("-n", host, "link", "set", "lo", "up")
            inner, outer = f"{self.tag}p{number}", f"{self.tag}q{number}"
            self._ip("link", "add", inner, "netns", host, "type", "veth", "peer", "name", outer, "netns", router)
            for name, link, last in ((host, inner, 2), (router, outer, 1)):
                self._ip("-n", name, "addr", "add", f"{self.PRIVATE}.{last}/24", "dev", link)
                self._ip("-n", name, "link", "set", link, "up")
            self._ip("-n", host, "route", "add", "default", "via", f"{self.PRIVATE}.1")
            self._ip("netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            leaving = ["-t", "nat", "-A", "POSTROUTING", "-o", f"{self.tag}i{number}", "-j", "MASQUERADE"]
            self._ip("netns", "exec", router, "iptables", *leaving)
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.hub, *self.routers, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture(
    params=[pytest.param(Apart, id="no route"), pytest.param(BehindRouters, id="routers", marks=pytest.mark.slow)]
)
def apart(request: pytest.FixtureRequest) -> Iterator[Apart]:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("emulated hosts need Linux and root")
    with contextlib.ExitStack() as stack:
        made = request.param()
        stack.callback(made.__exit__)
        yield made.__enter__()


SCRIPT = """
import torch
import laconic

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
x = torch.randn(64, 32)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with laconic.elastic(model, optimizer, laconic.Samples(64, 16, 8), codec="none", workers=2, patience_s=30.0) as job:
    for batch in job.batches():
        model(x[batch]).square().mean().backward()
        job.step()
    print(job.steps, job.digest, len(job.members))
"""


@pytest.mark.processes
def test_two_hosts_without_a_way_to_each_other_train_together(tmp_path: Path, apart: Apart) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    key = {KEY_VARIABLE: new_key().decode()}
    hub = ["-m", "laconic", "meet", "--host", "0.0.0.0", "--port", str(PORT), "--relay", str(RELAY)]
    meeting = apart.start(apart.hub, *hub, "--folder", str(tmp_path / "kept"), **key)
    try:
        until((tmp_path / "kept").exists)
        time.sleep(0.2)
        first, second = apart.hosts
        blocked = apart.start(first, "-c", "import socket; socket.create_connection(('10.78.2.2', 1), 1)")
        assert "refused" not in blocked.communicate(timeout=30)[1], "the hosts reach each other"
        workers = [
            apart.start(host, "-m", "laconic", "join", "--relay", f"10.78.{number}.1:{RELAY}",
                        f"tcp://10.78.{number}.1:{PORT}/job", str(tmp_path / "train.py"), **key)
            for number, host in enumerate((first, second), 1)
        ]  # fmt: skip
        said = [worker.communicate(timeout=100) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
        (steps, digest, members), other = (out.split() for out, _ in said)
        assert (steps, members) == ("32", "2")
        assert other == [steps, digest, members]
    finally:
        meeting.terminate()
        meeting.communicate(timeout=30)
