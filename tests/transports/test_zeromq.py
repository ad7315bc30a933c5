"""ZeroMQ ranks, for real: conformance, death, stop and departure, keys, strangers, and messages outside collectives."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from laconic import schedules
from laconic.errors import BadInput, CollectiveTimeout, NotAuthorised, PayloadError, PeerLost, TransportError
from laconic.transports.executor import run
from laconic.transports.launcher import LocalJob, run_local
from laconic.transports.rendezvous import find_place
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_keys import host_to_bind, is_loopback, new_key, read_key
from laconic.transports.zeromq_wire import CHUNK_NBYTES, Address, Header, Kind, identity, unpack
from tests.transports.conformance import contribution, run_conformance, total

pytestmark = pytest.mark.processes


def _open(timeout_s: float = 30.0, **options: Any) -> ZmqTransport:
    place = find_place(timeout_s)
    assert place.store is not None
    return ZmqTransport(place.store, place.rank, place.world_size, timeout_s, **options)


def _all_reduce(transport: ZmqTransport, numel: int, algorithm: str = "ring") -> None:
    x = contribution(transport.rank, numel)
    run(schedules.build("all_reduce", algorithm, transport.world_size, numel), x, transport)
    assert torch.equal(x, total(transport.world_size, numel)), (algorithm, numel)


# conformance


def _conform(key: bytes | None) -> int:
    with _open(key=key) as transport:
        run_conformance(transport)
        # several chunks a slice, on the way in and out
        for algorithm in ("ring", "direct", "tree"):
            _all_reduce(transport, 3 * CHUNK_NBYTES // 4 * transport.world_size + 5, algorithm)
        assert transport.rejected == 0
        return transport.rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_conformance(world_size: int) -> None:
    key = new_key() if world_size == 3 else None
    assert run_local(world_size, _conform, (key,), timeout_s=100) == list(range(world_size))
