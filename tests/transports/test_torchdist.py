"""gloo ranks, for real: the conformance suite, mismatches, and ranks that die or stop in the middle."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch

from laconic import schedules
from laconic.errors import TransportError
from laconic.transports.executor import run
from laconic.transports.launcher import LocalJob, run_local
from laconic.transports.rendezvous import find_place
from laconic.transports.torchdist import TorchTransport
from tests.transports.conformance import run_conformance

pytestmark = pytest.mark.processes


def _open(timeout_s: float = 30.0) -> TorchTransport:
    place = find_place(timeout_s)
    assert place.store is not None
    return TorchTransport(place.store, place.rank, place.world_size, timeout_s)


def _conform() -> int:
    with _open() as transport:
        run_conformance(transport)
        return transport.rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_conformance(world_size: int) -> None:
    assert run_local(world_size, _conform, timeout_s=100) == list(range(world_size))


def _disagree(what: str) -> tuple[str, str]:
    with _open(timeout_s=4) as transport:
        odd = transport.rank == 1
        numel = 11 if odd and what == "numel" else 10
        dtype = torch.int32 if odd and what == "dtype" else torch.float32
        algorithm = "tree" if odd and what == "algorithm" else "ring"
        x = torch.ones(numel, dtype=dtype)
        size = transport.world_size
        schedule = schedules.build("all_reduce", algorithm, size, numel)
        if what == "segment":
            schedule = schedules.ring(size, numel, segment=2 if odd else 1)
        if what == "root":
            schedule = schedules.build("broadcast", "tree", size, numel, root=transport.rank)
        try:
            run(schedule, x, transport)
        except TransportError as error:
            return type(error).__name__, str(error)
        return "nothing", ""


@pytest.mark.parametrize("what", ["numel", "dtype", "algorithm", "segment", "root"])
def test_mismatch_is_an_error_on_every_rank(what: str) -> None:
    for kind, text in run_local(3, _disagree, (what,), timeout_s=60):
        assert kind == "Mismatch", text
        assert "this rank called" in text


def _hammer(timeout_s: float) -> tuple[str, int | None, str]:
    store = find_place(timeout_s).store
    assert store is not None
    with _open(timeout_s) as transport:
        schedule = schedules.ring(transport.world_size, 100_000)
        x = torch.ones(100_000)
        deadline = time.monotonic() + 40
        try:
            while time.monotonic() < deadline:
                run(schedule, x, transport)
                x.fill_(1.0)
                if transport.rank == 0:
                    store.set("going", b"1")
        except TransportError as error:
            return type(error).__name__, error.peer, str(error)
        return "nothing", None, ""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named(sign: signal.Signals) -> None:
    job = LocalJob(4, _hammer, (5.0,))
    job.store.wait(["laconic/r0/going"], timedelta(seconds=60))
    time.sleep(0.3)
    os.kill(job.processes[2].pid, sign)
    survivors = job.outcomes(timeout_s=40, ranks=(0, 1, 3))
    assert len(survivors) == 3
    for outcome in survivors:
        assert outcome.value is not None, outcome
        kind, peer, text = outcome.value
        assert (kind, peer) == ("PeerLost", 2), text
        assert "peer 2" in text
        assert "round" in text


def _hold_the_store() -> tuple[str, int | None, str]:
    """Rank 0's own process holds the store, as under a plain RANK/MASTER_ADDR start."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ["MASTER_PORT"] = os.environ["LACONIC_TEST_PORT"]
    place = find_place(20.0)
    assert place.store is not None
    assert place.store_host == 0
    with TorchTransport(place.store, place.rank, place.world_size, 4.0, store_host=0) as transport:
        schedule = schedules.ring(transport.world_size, 1000)
        try:
            for turn in range(100_000):
                run(schedule, torch.ones(1000), transport)
                if turn == 20 and transport.rank == 0:
                    os.kill(os.getpid(), signal.SIGSTOP)
        except TransportError as error:
            return type(error).__name__, error.peer, str(error)
    return "nothing", None, ""


def test_the_rank_that_holds_the_store_stops() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = LocalJob(3, _hold_the_store, environment={"LACONIC_TEST_PORT": port})
    for outcome in job.outcomes(timeout_s=60, ranks=(1, 2)):
        assert outcome.value is not None, outcome
        kind, peer, text = outcome.value
        assert (kind, peer) == ("PeerLost", 0), text
