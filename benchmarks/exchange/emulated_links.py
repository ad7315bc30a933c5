"""How true emulated links are: round trip, TCP's rate and the forwarders' processor time beside what was asked for.

    python -m benchmarks emulated-links --output benchmarks/results/emulated-links.json      (about 2 minutes; root)

Two hosts; the median of some round trips of one byte on an open TCP connection, then one stream for some seconds, of
which the first half is left out (TCP's slow start).
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, echo_json
from laconic.storage import files
from laconic_lab.bench.turns import conditions
from laconic_lab.clusters.cluster import Cluster

LINKS = (
    "10mbit,40ms", "20mbit,40ms", "100mbit,5ms", "100mbit,20ms", "100mbit,40ms", "200mbit,20ms", "100mbit,40ms,5ms",
    "100mbit,40ms,0ms,0.1%",
)  # fmt: skip
PORT, ROUND_TRIPS = 5001, 21


def stream(target: str, seconds: float) -> float:
    """Of the first rank: the median round trip in seconds. Of the second: bits a second of a stream's second half."""
    if os.environ["LACONIC_BIND"] == target:
        with socket.create_server((target, PORT)) as server, server.accept()[0] as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                line.sendall(line.recv(1))
            marks, total = [], 0
            while received := line.recv(1 << 20):
                total += len(received)
                marks.append((time.monotonic(), total))
            late = [mark for mark in marks if mark[0] > marks[0][0] + seconds / 2]
            return 8 * (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])
    with _connected(target) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken = []
        for _ in range(ROUND_TRIPS):
            begun = time.monotonic()
            line.sendall(b"?")
            line.recv(1)
            taken.append(time.monotonic() - begun)
        ends, block = time.monotonic() + seconds, bytes(1 << 16)
        while time.monotonic() < ends:
            line.sendall(block)
    return statistics.median(taken)


def _connected(target: str) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection((target, PORT), timeout=30)
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"nobody listens at {target}")


def measure(link: str, seconds: float) -> dict[str, Any]:
    """What a link gives, beside what was asked for."""
    with Cluster(2, link) as cluster:
        round_trip_s, rate_bps = cluster.run(stream, ("10.77.0.2", seconds), timeout_s=60 + 10 * seconds)
        taken = [_processor_s(each.pid) for each in cluster.forwarders]
        sent = cluster.sent_nbytes(0)
    asked = cluster.link
    assert asked.rate_bps is not None
    return {
        "link": link, "round_trip_seconds": round_trip_s, "rate_bps": rate_bps,
        "round_trip_ratio": round_trip_s / (2 * asked.latency_s), "rate_ratio": rate_bps / asked.rate_bps,
        "forwarder_core_share": max(taken) / (8 * sent / asked.rate_bps),
    }  # fmt: skip


def _processor_s(process: int) -> float:
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def table(record: dict[str, Any]) -> str:
    """The rows for docs/research/emulated-networks.md."""
    heads = "asked for | round trip | × asked | one TCP stream | × asked | the forwarder's share of a core"
    return "\n".join([
        f"| {heads} |", "|---|---|---|---|---|---|",
        *(f"| `{row['link']}` | {1e3 * row['round_trip_seconds']:.1f} ms | {row['round_trip_ratio']:.3f} | "
          f"{row['rate_bps'] / 1e6:.1f} Mbit/s | {row['rate_ratio']:.3f} | {row['forwarder_core_share']:.2f} |"
          for row in record["results"]),
        "", f"Load of the machine before: {record['load_average_before']:.1f}.",
    ])  # fmt: skip


def main(
    links: Annotated[list[str] | None, typer.Option("--link", help="To measure; may be given several times.")] = None,
    seconds: Annotated[float, typer.Option(help="Of each stream.")] = 8.0,
    output: Annotated[Path | None, typer.Option(help="Where to write the record.")] = None,
    json: Json = False,
) -> None:
    """Measure emulated links with a latency."""
    record = {**conditions(hosts=2), "results": [measure(link, seconds) for link in links or LINKS]}
    if output is not None:
        files.replace(output, dumps(record, indent=1) + "\n")
    if json:
        echo_json(record)
    else:
        typer.echo(table(record))


if __name__ == "__main__":
    typer.run(main)
