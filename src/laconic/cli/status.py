"""`laconic status`: show an elastic job's members, their progress and the last events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Annotated, Any

import typer

from laconic import words
from laconic.cli.shared import Json, count_option, echo_json, echo_table
from laconic.consistency.elastic.meeting import Meeting
from laconic.errors import BadInput, StorageError

HEADINGS = ("worker", "host", "reached", "step", "s/step", "waits", "sent", "rejoined", "heard")
GAUGES = ("step", "epoch", "seconds_per_step", "wait_share", "sent_nbytes", "rejoined")
SHOWN = 8  # events
AGAIN_S = 2.0
AHEAD_S = 5.0  # a clock that is more than this ahead is told of


def status(
    meeting: Annotated[str, typer.Argument(help="Where the job meets: a folder, tcp://… or etcd://….")],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds, until the job ends.")] = False,
    prometheus: Annotated[int | None, count_option("Serve Prometheus metrics on this loopback port.")] = None,
    json: Json = False,
) -> None:
    """Show the members of an elastic job, their steps and waits, and the last losses."""
    with contextlib.closing(Meeting(meeting)) as place:
        if prometheus is not None:
            return _serve(place, prometheus)
        for _ in _rounds(watch):
            try:
                found = collect(place)
            except StorageError as error:
                if not watch:
                    raise
                typer.echo(str(error), err=True)  # it may come back
                continue
            if json:
                echo_json(found)
            else:
                _show(found)
            if found["finished"]:
                return


def collect(place: Meeting) -> dict[str, Any]:
    """Collect a job's state: its view, for how many workers its first step waits, the last reports and events."""
    view, now = place.newest(), time.time()
    said = {status["worker"]: status for status in place.statuses()}
    members = [
        {**said.get(member, {"worker": member}), "heard_s": now - said[member]["at"] if member in said else None}
        for member in (view.ids if view else ())
    ]
    wanted = said.get(view.coordinator, {}).get("waits_for", 0) if view else 0
    return {
        "meeting": place.where,
        "finished": place.finished,
        "waits_for": wanted if wanted > len(members) else 0,
        "job": view.job if view else None,
        "view": view.number if view else 0,
        "members": members,
        "events": place.events()[-SHOWN:],
    }


def _rounds(watch: bool) -> Iterator[None]:
    yield
    with contextlib.suppress(KeyboardInterrupt):
        while watch:
            time.sleep(AGAIN_S)
            yield


def _show(found: dict[str, Any]) -> None:
    if not found["view"]:
        typer.echo(f"nobody has met at {found['meeting']} yet")
        return
    state = "finished" if found["finished"] else f"{len(found['members'])} members"
    typer.echo(f"{found['meeting']}: {state}, view {found['view']}, {found['job']}")
    if found["waits_for"]:
        typer.echo(f"the first step waits for {found['waits_for']} workers: {len(found['members'])} so far")
    for sentence in clocks(found):
        typer.echo(sentence, err=True)
    echo_table(HEADINGS, [_cells(member) for member in found["members"]], left=("host", "reached"))
    for each in found["events"]:
        typer.echo(f"  {each['seconds']:.1f} s, step {each['step']}: worker {each['rank']} {each['what']}")


def clocks(found: dict[str, Any]) -> list[str]:
    """A sentence for each member whose clock is ahead of this machine's."""
    cure = "set both by NTP for right times here; training needs no clock"
    return [
        f"the clock of worker {member['worker']} is {-member['heard_s']:.0f} s ahead of this machine's: {cure}"
        for member in found["members"] if (member["heard_s"] or 0.0) < -AHEAD_S
    ]  # fmt: skip


def _cells(member: dict[str, Any]) -> list[str]:
    if member["heard_s"] is None:
        return [str(member["worker"]), *[""] * (len(HEADINGS) - 2), "not yet"]
    return [
        str(member["worker"]), member["host"], member["reached"], str(member["step"]),
        f"{member['seconds_per_step']:.3g}", f"{member['wait_share']:.0%}", words.nbytes(member["sent_nbytes"]),
        str(member["rejoined"]), f"{max(0.0, member['heard_s']):.0f} s ago",
    ]  # fmt: skip


def exposition(found: dict[str, Any]) -> str:
    """The same in Prometheus' text format."""
    lines = [f"laconic_view {found['view']}", f"laconic_members {len(found['members'])}",
             f"laconic_finished {int(found['finished'])}"]  # fmt: skip
    for member in found["members"]:
        lines += [
            f'laconic_{name}{{worker="{member["worker"]}"}} {member[name]}' for name in GAUGES if name in member
        ]
    return "\n".join(lines) + "\n"


def _serve(place: Meeting, port: int) -> None:
    class Metrics(BaseHTTPRequestHandler):
        timeout = AGAIN_S  # of somebody who connects without a word, behind whom the others wait

        def do_GET(self) -> None:
            try:
                code, text = 200, exposition(collect(place))
            except StorageError as error:
                code, text = 503, f"# {error}\n"
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    try:
        server = HTTPServer(("127.0.0.1", port), Metrics)
    except OSError as error:
        raise BadInput(f"cannot serve metrics at 127.0.0.1:{port}: {error.strerror}") from None
    with server, contextlib.suppress(KeyboardInterrupt):
        typer.echo(f"metrics of {place.where} are at http://127.0.0.1:{port}/metrics", err=True)
        server.serve_forever()
