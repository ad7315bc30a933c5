"""`laconic schedule`: draw who talks to whom, round by round."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from laconic import schedules
from laconic.schedules.validate import check_size, fewest_places


def schedule(
    algorithm: Annotated[str, typer.Argument(help="ring, butterfly, tree, rabenseifner, direct, hierarchical, graph…")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="World size.")] = 4,
    numel: Annotated[int | None, typer.Option(help="Values in the buffer; default: one a rank.")] = None,
    collective: Annotated[str, typer.Option(help="all_reduce, reduce, broadcast, reduce_scatter, …")] = "all_reduce",
    segment: Annotated[int | None, typer.Option(help="ring: the most values in one message.")] = None,
    root: Annotated[int | None, typer.Option(help="reduce, broadcast: the root's rank.")] = None,
    hosts: Annotated[int | None, typer.Option(help="hierarchical: how many hosts.")] = None,
    inner: Annotated[str | None, typer.Option(help="hierarchical: algorithm inside a host.")] = None,
    outer: Annotated[str | None, typer.Option(help="hierarchical: algorithm among the hosts.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw a schedule after proving it right; `0⇄1` is an exchange, `0→1` one way, `+` adds and `=` copies."""
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
