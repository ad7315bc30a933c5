"""`laconic simulate`: what a collective would take on a cluster one does not have."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic import schedules
from laconic.errors import BadInput
from laconic.schedules.bound import lower_bound_s
from laconic.schedules.link import Link, parse_nbytes


def simulate(
    collective: Annotated[str, typer.Argument(help="allreduce, reduce, broadcast, reduce_scatter, all_gather, …")],
    algorithm: Annotated[str, typer.Option(help="The algorithm; see `laconic schedule`.")] = "ring",
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="World size.")] = 8,
    nbytes: Annotated[str, typer.Option(help="Buffer size, e.g. 4096, 100MB, 64MiB.")] = "100MB",
    link: Annotated[str, typer.Option(help="BANDWIDTH[,LATENCY] as 10gbit,5us; or a profile from laconic probe.")] = (
        "10gbit,5us"
    ),
    itemsize: Annotated[int, typer.Option(help="Bytes per value.")] = 4,
    hosts: Annotated[int | None, typer.Option(help="hierarchical: how many hosts.")] = None,
    segment: Annotated[int | None, typer.Option(help="ring: the most values in one message.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a collective under LogGP, message by message, beside its closed form and the lower bound."""
    begun = time.perf_counter()
    from laconic.transports.loggp import simulate as run

    name = "all_reduce" if collective in ("allreduce", "all-reduce") else collective.replace("-", "_")
    if itemsize < 1:
        raise BadInput(f"itemsize must be at least 1 byte, got {itemsize}")
    numel = -(-parse_nbytes(nbytes) // itemsize)
    wanted: dict[str, Any] = {"hosts": hosts, "segment": segment}
    parameters = {key: value for key, value in wanted.items() if value is not None}
    schedule = schedules.build(name, algorithm, ranks, numel, **parameters)
    cost = _link(link)
    result = run(schedule, cost, itemsize)
    record = {
        "collective": name,
        "algorithm": algorithm,
        "world_size": ranks,
        "nbytes": numel * itemsize,
        "link": cost.to_dict(),
        "seconds": result.seconds,
        "closed_form_seconds": schedule.cost(cost, itemsize),
        "lower_bound_seconds": lower_bound_s(schedule, cost, itemsize) if name == "all_reduce" else None,
        "rounds": result.rounds,
        "messages": result.messages,
        "sent_nbytes": result.sent_nbytes,
        "simulated": True,
        "took_seconds": time.perf_counter() - begun,
    }
    if json:
        typer.echo(json_module.dumps(record))
        return
    typer.echo(
        f"{name} by {algorithm}, {ranks} ranks, {numel * itemsize} bytes (simulated): {result.seconds:.6g} s; "
        f"closed form {record['closed_form_seconds']:.6g} s"
    )
    if record["lower_bound_seconds"] is not None:
        typer.echo(f"lower bound {record['lower_bound_seconds']:.6g} s")
    typer.echo(f"{result.rounds} rounds, {result.messages} messages, {result.sent_nbytes} bytes sent by all ranks")


def _link(text: str) -> Link:
    """A link from its text, or from a profile's path."""
    if text.endswith(".json") or Path(text).is_file():
        from laconic.transports.profile import Profile

        return Profile.load(text).link
    return Link.parse(text)
