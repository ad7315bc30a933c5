"""What each rank runs under `mpiexec`: `python mpi_program.py CHECK…`; started by test_mpi.py, exits 0 if all hold."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

# ruff: noqa: E402
import pytest
import torch

from laconic import schedules
from laconic.errors import CollectiveTimeout, Mismatch, PeerLost, TransportError
from laconic.transports.executor import run
from laconic.transports.mpi import MpiTransport
from tests.transports.conformance import contribution, run_conformance, total


def conformance() -> None:
    """The suite of every engine, several transports in a row, and a clean close on every rank."""
    for _ in range(2):
        with MpiTransport(timeout_s=30) as transport:
            run_conformance(transport)
    assert transport.comm == transport.mpi.COMM_NULL  # freed
    transport.close()


def native() -> None:
    with MpiTransport(timeout_s=30) as transport:
        everyone = torch.stack([contribution(r, 50, torch.int64) for r in range(transport.world_size)])
        expected = {"sum": everyone.sum(0), "mean": everyone.sum(0), "product": everyone.prod(0)}
        expected |= {"max": everyone.amax(0), "min": everyone.amin(0)}
        for dtype in (torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
            for op, value in expected.items():
                x = contribution(transport.rank, 50, dtype)
                assert transport.native_all_reduce(x, op)
                assert torch.equal(x, value.to(dtype)), (dtype, op)
        for numel in (0, 1, 300_000):
            x = contribution(transport.rank, numel)
            assert transport.native_all_reduce(x, "sum")
            assert torch.equal(x, total(transport.world_size, numel))
        for dtype in (torch.float16, torch.bfloat16, torch.bool):
            assert not transport.native_all_reduce(torch.ones(3, dtype=dtype), "sum")


def many_messages() -> None:
    """Of messages between two ranks, which count by leaps, only the latest are remembered."""
    with MpiTransport(timeout_s=30) as transport:
        for _ in range(1000):
            transport.leave(transport.point(0, 1, 3, "float32"))
        assert len(transport._signatures) == 256


def mismatch(what: str) -> None:
    """Rank 1 calls something else: every rank raises Mismatch, quoting both calls, and the transport is broken."""
    transport = MpiTransport(timeout_s=30)
    odd = transport.rank == 1
    numel = 300_001 if odd and what == "numel" else 300_000
    dtype = torch.int32 if odd and what == "dtype" else torch.float32
    algorithm = "tree" if odd and what in ("algorithm", "native") else "ring"
    x, started = torch.ones(numel, dtype=dtype), time.monotonic()
    schedule = schedules.build("all_reduce", algorithm, transport.world_size, numel)
    if odd and what == "algorithm":
        time.sleep(1.5)  # it comes when the others have compared notes, and must not set them against each other
    native = what.startswith("native") and algorithm == "ring"
    with pytest.raises(Mismatch) as caught:
        transport.native_all_reduce(x[1:] if odd else x, "sum") if native else run(schedule, x, transport)
    text, peer = str(caught.value), caught.value.peer
    assert caught.value.rank == transport.rank
    assert (peer != 1) if odd else (peer == 1), (peer, text)
    assert text.count("all_reduce by ") == 2, text
    assert text.startswith(f"[rank {transport.rank}/{transport.world_size}]"), text
    assert time.monotonic() - started < 20, "the time-out was waited out"
    refused(transport, Mismatch)
    transport.close()


def timeout() -> None:
    """Rank 1 comes late: the others name it in time, and it learns that they gave up."""
    transport = MpiTransport(timeout_s=0.5)
    while transport.rank == 1 and not Path("gave up").exists():
        time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises((CollectiveTimeout, PeerLost)) as caught:
        run(schedules.direct(transport.world_size, 1000), torch.ones(1000), transport)
    seen = caught.value
    Path("gave up").touch()
    assert time.monotonic() - started < 10
    if transport.rank == 1:
        assert isinstance(seen, PeerLost)
        assert "gave up" in str(seen)
    else:
        assert seen.peer == 1, seen
        assert "in 0.5 s" in str(seen), seen
    refused(transport, type(seen))
    transport.close()


def stop() -> None:
    """Rank 1 is stopped: the others say so at the time-out, and it learns that they gave up when it goes on."""
    transport = MpiTransport(timeout_s=1.0)
    run(schedules.ring(transport.world_size, 10), torch.ones(10), transport)
    if transport.rank == 1:
        Path("stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(PeerLost) as caught:
        run(schedules.direct(transport.world_size, 1000), torch.ones(1000), transport)
    if transport.rank == 1:
        assert "gave up" in str(caught.value), caught.value
    else:
        assert caught.value.peer == 1, caught.value
        assert "peer 1 was lost: it is stopped" in str(caught.value), caught.value
        Path(f"knows {transport.rank}").touch()
    if transport.rank == 0:
        while not all(Path(f"knows {rank}").exists() for rank in (0, 2)):
            time.sleep(0.01)
        os.kill(int(Path("stopped").read_text()), signal.SIGCONT)
    transport.close()


def leave() -> None:
    """Rank 1 closes before a call the others make: PeerLost naming it, long before the time-out."""
    transport = MpiTransport(timeout_s=40)
    run(schedules.ring(transport.world_size, 10), torch.ones(10), transport)
    if transport.rank != 1:
        started = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            run(schedules.direct(transport.world_size, 1000), torch.ones(1000), transport)
        assert caught.value.peer == 1, caught.value
        assert caught.value.round is not None
        assert time.monotonic() - started < 20
    transport.close()


def refused(transport: MpiTransport, kind: type[TransportError]) -> None:
    """Whatever is called on a broken transport raises the same error at once."""
    for _ in range(2):
        with pytest.raises(kind):
            run(schedules.ring(transport.world_size, 1), torch.ones(1), transport)


CHECKS = {
    "conformance": conformance,
    "native": native,
    "many messages": many_messages,
    "mismatch": mismatch,
    "timeout": timeout,
    "stop": stop,
    "leave": leave,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        for argument in sys.argv[1:]:
            check, *parameters = argument.split(":")
            CHECKS[check](*parameters)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)  # mpiexec then ends the other ranks
