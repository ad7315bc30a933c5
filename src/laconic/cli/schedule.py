"""`laconic schedule` draws a collective's messages; `laconic simulate` predicts its time on any cluster."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic import schedules, words
from laconic.cli.shared import Json
from laconic.errors import BadInput
from laconic.quantities import parse_nbytes
from laconic.schedules.link import Link, lower_bound_s
from laconic.schedules.registry import check_parameters
from laconic.schedules.schedule import check_sizes
from laconic.schedules.validate import check_size, fewest_places


def schedule(
    algorithm: Annotated[str, typer.Argument(help="ring, butterfly, tree, rabenseifner, direct, hierarchical, graph…")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="World size.")] = 4,
    numel: Annotated[int | None, typer.Option(help="Values in the buffer; default: one per rank.")] = None,
    collective: Annotated[str, typer.Option(help="all_reduce, reduce, broadcast, reduce_scatter, …")] = "all_reduce",
    segment: Annotated[int | None, typer.Option(help="ring: the most values in one message.")] = None,
    root: Annotated[int | None, typer.Option(help="reduce, broadcast: the root's rank.")] = None,
    hosts: Annotated[int | None, typer.Option(help="hierarchical: number of hosts.")] = None,
    inner: Annotated[str | None, typer.Option(help="hierarchical: algorithm inside a host.")] = None,
    outer: Annotated[str | None, typer.Option(help="hierarchical: algorithm among the hosts.")] = None,
    json: Json = False,
) -> None:
    """Verify a schedule and draw it; `0⇄1` is an exchange, `0→1` one way, `+` adds and `=` copies."""
    wanted = {"segment": segment, "root": root, "hosts": hosts, "inner": inner, "outer": outer}
    parameters: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    if algorithm == "graph":
        collective = "neighbourhood"
    values = ranks if numel is None else numel
    check_size(ranks, fewest_places(ranks, values))  # at once, not after it was built
    built = schedules.validate(schedules.build(collective, algorithm, ranks, values, **parameters))
    if not json:
        typer.echo(str(built))
        return
    m = built.messages
    rows = zip(m.round.tolist(), m.src.tolist(), m.dst.tolist(), m.start.tolist(), m.stop.tolist(), m.at.tolist(),
               m.add.tolist(), strict=True)  # fmt: skip
    messages = [
        {"round": r, "src": s, "dst": d, "start": a, "stop": b, "at": t, "op": "add" if add else "copy"}
        for r, s, d, a, b, t, add in rows
    ]
    summary = {"collective": built.collective, "algorithm": built.algorithm, "world_size": ranks, "numel": values,
               "rounds": built.rounds, "sent_numel": built.sent_numel}  # fmt: skip
    typer.echo(json_module.dumps({**summary, "messages": messages}))


MOST_MESSAGES = 8_000_000  # of a simulation: 1.3 GB at 170 bytes each


def simulate(
    collective: Annotated[str, typer.Argument(help="allreduce, reduce, broadcast, reduce_scatter, all_gather, …")],
    algorithm: Annotated[str, typer.Option(help="The algorithm; see `laconic schedule`.")] = "ring",
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="World size.")] = 8,
    nbytes: Annotated[str, typer.Option(help="Buffer size, e.g. 4096, 100MB, 64MiB.")] = "100MB",
    link: Annotated[str, typer.Option(help="RATE[,LATENCY] as 10gbit,5us; or a profile from laconic probe.")] = (
        "10gbit,5us"
    ),
    itemsize: Annotated[int, typer.Option(help="Bytes per value.")] = 4,
    hosts: Annotated[int | None, typer.Option(help="hierarchical: number of hosts.")] = None,
    segment: Annotated[int | None, typer.Option(help="ring: the most values in one message.")] = None,
    closed_form: Annotated[bool, typer.Option("--closed-form", help="The closed form only; no simulation.")] = False,
    json: Json = False,
) -> None:
    """Simulate a collective under LogGP, and print its closed form and lower bound beside it.

    With too many messages to simulate, it prints only the closed form, and says so.
    """
    begun = time.perf_counter()
    name = "all_reduce" if collective in ("allreduce", "all-reduce") else collective.replace("-", "_")
    numel = _numel(nbytes, itemsize)
    wanted: dict[str, Any] = {"hosts": hosts, "segment": segment}
    parameters = {key: value for key, value in wanted.items() if value is not None}
    cost = _link(link)
    messages = _dense_messages(name, algorithm, ranks, numel, parameters)
    formula = closed_form or messages > MOST_MESSAGES
    record = {
        "collective": name,
        "algorithm": algorithm,
        "world_size": ranks,
        "nbytes": numel * itemsize,
        "link": cost.to_dict(),
        **(_formula if formula else _simulated)(name, algorithm, ranks, numel, itemsize, cost, parameters),
        "simulated": not formula,
    }
    record["took_seconds"] = time.perf_counter() - begun
    if json:
        typer.echo(json_module.dumps(record))
        return
    head = f"{name} by {algorithm}, {ranks} ranks, {words.nbytes(numel * itemsize)}"
    closed = f"closed form {record['closed_form_seconds']:.6g} s"
    if formula:
        typer.echo(f"{head} (not simulated): {closed}")
        if not closed_form:
            typer.echo(f"about {messages:.2g} messages are too many to simulate ({MOST_MESSAGES:.2g} at most)")
    else:
        typer.echo(f"{head} (simulated): {record['seconds']:.6g} s; {closed}")
    if record["lower_bound_seconds"] is not None:
        typer.echo(f"lower bound {record['lower_bound_seconds']:.6g} s")
    counted = "" if record["messages"] is None else f"{record['messages']} messages, "
    typer.echo(f"{record['rounds']} rounds, {counted}{words.nbytes(record['sent_nbytes'])} sent by all ranks")


def _numel(nbytes: str, itemsize: int) -> int:
    """How many values `nbytes` are."""
    if itemsize < 1:
        raise BadInput(f"itemsize must be at least 1 byte, got {itemsize}")
    whole, rest = divmod(parse_nbytes(nbytes), itemsize)
    if rest:
        raise BadInput(
            f"--nbytes {nbytes} is no whole number of values of {itemsize} bytes; take a multiple, or --itemsize 1"
        )
    return whole


def _dense_messages(
    collective: str, algorithm: str, ranks: int, numel: int, parameters: Mapping[str, Any]
) -> int:
    """About how many messages an algorithm of P² messages has; 0 for one with few."""
    if not schedules.get(collective, algorithm).dense:
        return 0
    segment = parameters.get("segment")
    return 2 * ranks**2 * (1 if not segment else max(1, -(-numel // (ranks * segment))))


def _simulated(
    collective: str, algorithm: str, ranks: int, numel: int, itemsize: int, link: Link, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    from laconic.transports.loggp import simulate as run

    schedule = schedules.build(collective, algorithm, ranks, numel, **parameters)
    result = run(schedule, link, itemsize)
    return {
        "seconds": result.seconds,
        "closed_form_seconds": schedules.cost(schedule, link, itemsize),
        "lower_bound_seconds": lower_bound_s(schedule, link, itemsize) if collective == "all_reduce" else None,
        "rounds": result.rounds,
        "messages": result.messages,
        "sent_nbytes": result.sent_nbytes,
    }


def _formula(
    collective: str, algorithm: str, ranks: int, numel: int, itemsize: int, link: Link, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    entry = schedules.get(collective, algorithm)
    check_sizes(ranks, numel)
    check_parameters(collective, algorithm, parameters)
    seconds = entry.seconds(ranks, numel * itemsize, link, **parameters)
    return {
        "seconds": seconds,
        "closed_form_seconds": seconds,
        "lower_bound_seconds": None,  # depends on how many peers a rank talks to at once, which the messages tell
        "rounds": entry.rounds(ranks, **parameters) if numel else 0,
        "messages": None,
        "sent_nbytes": entry.sent_numel(ranks, numel, **parameters) * itemsize,
    }


def _link(text: str) -> Link:
    """A link from its text, or from a profile's path."""
    if text.endswith(".json") or Path(text).is_file():
        from laconic.transports.profile import Profile

        return Profile.load(text).link
    return Link.parse(text)
