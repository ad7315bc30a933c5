"""ZeroMQ's rate over a long fat link by one TCP connection and by several, beside the link's own.

    python -m benchmarks connections --output benchmarks/results/connections.json           (about 3 minutes; root)

Two hosts, of which one sends the other long messages for some seconds. Bytes count from half of that time on (TCP's
slow start). Both ways of counting are given: with slow start is what a first outer step sees.
"""

from __future__ import annotations

import contextlib
import time
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import laconic
from laconic.cli.shared import Json, echo_json
from laconic.errors import CollectiveTimeout, PeerLost
from laconic.schedules.link import Link
from laconic.storage import files
from laconic.transports.frame import EngineKind, Frame, Header
from laconic.transports.tcp_window import TcpLimits, connections_for, needed_nbytes
from laconic.transports.zeromq import ZmqTransport
from laconic_lab.bench.turns import conditions
from laconic_lab.clusters.cluster import Cluster

MESSAGE_NBYTES = 8 << 20


def stream(connections: int, seconds: float) -> tuple[float, float]:
    """Of the first rank: bits a second of all that came, and of the second half. Zeros of the second, which sends."""
    with laconic.init("zmq", insecure=True, connections=connections) as world:
        transport = world.transport
        assert isinstance(transport, ZmqTransport)
        if world.rank == 1:
            payload, ends = torch.zeros(MESSAGE_NBYTES, dtype=torch.uint8), time.monotonic() + seconds
            while time.monotonic() < ends:
                transport.send_to(0, Frame(Header(EngineKind.PARCEL), payload=payload)).sent()
            transport.send_to(0, Frame(Header(EngineKind.PARCEL, code=1)))
            with contextlib.suppress(CollectiveTimeout, PeerLost):
                transport.recv_any(60)
            return 0.0, 0.0
        begun, marks, total = time.monotonic(), [(0.0, 0)], 0
        while not (frame := transport.recv_any(60)[1]).header.code:
            total += frame.payload.nbytes
            marks.append((time.monotonic() - begun, total))
        transport.send_to(1, Frame(Header(EngineKind.PARCEL, code=1))).sent()
    late = [mark for mark in marks if mark[0] > seconds / 2]
    return 8 * total / marks[-1][0], 8 * (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


def measure(link: str, connections: int, seconds: float) -> dict[str, Any]:
    """What so many connections make of a link, beside its rate."""
    with Cluster(2, link) as cluster:
        (whole_bps, late_bps), _ = cluster.run(stream, (connections, seconds), timeout_s=120 + 10 * seconds)
    rate_bps = Link.parse(link).rate_bps
    assert rate_bps is not None
    return {
        "link": link, "connections": connections, "rate_bps": late_bps, "whole_bps": whole_bps,
        "rate_ratio": late_bps / rate_bps, "whole_ratio": whole_bps / rate_bps,
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """The rows for docs/reference/link.md."""
    return "\n".join([
        "| link | connections | rate | × the link's | from the first byte | × the link's |",
        "|---|---|---|---|---|---|",
        *(f"| `{row['link']}` | {row['connections']} | {row['rate_bps'] / 1e6:.0f} Mbit/s | {row['rate_ratio']:.2f} | "
          f"{row['whole_bps'] / 1e6:.0f} Mbit/s | {row['whole_ratio']:.2f} |" for row in record["results"]),
        "", f"Bandwidth × delay {record['needed_nbytes']} B, one connection's window {record['window_nbytes']} B; "
        f"auto: {record['auto']}. Load of the machine before: {record['load_average_before']:.1f}.",
    ])  # fmt: skip


def main(
    link: Annotated[str, typer.Option(help="The emulated link.")] = "200mbit,80ms",
    connections: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    seconds: Annotated[float, typer.Option(help="Of each stream.")] = 12.0,
    output: Annotated[Path | None, typer.Option(help="Where to write the record.")] = None,
    json: Json = False,
) -> None:
    """Measure one and several TCP connections over a long fat link."""
    known, limits = Link.parse(link), TcpLimits.read()
    record = {
        **conditions(hosts=2),
        "needed_nbytes": needed_nbytes(known),
        "window_nbytes": limits and limits.window_nbytes,
        "auto": connections_for(known, limits),
        "results": [measure(link, each, seconds) for each in connections or (1, 2, 4, 8)],
    }
    if output is not None:
        files.replace(output, dumps(record, indent=1) + "\n")
    if json:
        echo_json(record)
    else:
        typer.echo(table(record))


if __name__ == "__main__":
    typer.run(main)
