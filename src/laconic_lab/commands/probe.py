"""`laconic probe`: measure the link and save its profile."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.shared import Engine, Ranks, echo_json
from laconic.errors import BadInput
from laconic.transports.profile import Profile
from laconic.transports.tcp_window import TcpLimits, advice, connections_for, needed_nbytes
from laconic_lab.bench.collectives import measure_link
from laconic_lab.clusters.launch import run_job


def probe(
    ranks: Ranks = 4,
    engine: Engine = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to save the profile.")] = Path("link.json"),
    quick: Annotated[bool, typer.Option("--quick", help="About 2 s instead of 15.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure the link, fit LogGP parameters, and save them for auto, the simulator and the planner."""
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BadInput(f"the profile cannot be saved as {output}: name a file in a folder that exists")
    text = run_job(ranks, engine, measure_link, (quick,))
    if text is None:
        return
    profile = Profile.from_json(text)
    profile.save(output)
    link, limits = profile.link, TcpLimits.read()
    cure = [] if limits is None else advice(link, limits)
    if json:
        window = {
            "needed_nbytes": needed_nbytes(link),
            "limits": limits and asdict(limits),
            "sysctl": cure,
            "connections": connections_for(link, limits),
        }
        echo_json({**json_module.loads(text), "tcp_window": window})
        return
    bandwidth = f"{1e-9 / link.s_per_byte:.3g} GB/s" if link.s_per_byte else "no limit seen"
    typer.echo(f"{profile.engine}, {profile.world_size} ranks, all talking at once")
    typer.echo(f"  L latency            {link.latency_s * 1e6:10.1f} µs")
    typer.echo(f"  o overhead           {link.overhead_s * 1e6:10.1f} µs per message")
    typer.echo(f"  g gap                {link.gap_s * 1e6:10.1f} µs between messages")
    typer.echo(f"  G per byte           {link.s_per_byte * 1e9:10.3f} ns  ({bandwidth})")
    typer.echo(f"  γ adding             {link.reduce_s_per_byte * 1e9:10.3f} ns per byte")
    typer.echo(f"  bandwidth × delay    {needed_nbytes(link):10d} B, under way in a round trip when the link is full")
    if limits is not None:
        most = f"{limits.receive_nbytes} B received, {limits.send_nbytes} B sent"
        typer.echo(f"  TCP's window         {limits.window_nbytes:10d} B at most for one connection (buffers: {most})")
    for line in cure:
        typer.echo(f"    one connection cannot fill this link; on both ends: {line}")
    if (many := connections_for(link, limits)) > 1:
        typer.echo(f"  connections          {many:10d} to each peer, where this profile is given and the engine is zmq")
    typer.echo(f"  residual of the fit  {100 * profile.relative_rms:10.1f} % (root mean square, relative)")
    for residual in profile.residuals:
        typer.echo(
            f"    {residual.messages:>3} × {residual.nbytes:>9} B   measured {residual.measured_s * 1e6:10.1f} µs   "
            f"fitted {residual.fitted_s * 1e6:10.1f} µs   {100 * residual.relative:+6.1f} %"
        )
    typer.echo(f"saved to {output}; use it by LACONIC_LINK={output} or laconic.init(profile=…)")
