"""`laconic run`: run your own script on an emulated network."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from laconic import words
from laconic.errors import BadInput
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.clusters.programs import Failed, Programs
from laconic_lab.commands import run_options as options
from laconic_lab.runs.progress import say

RunLink = Annotated[str, typer.Option(help="Each host's link: RATE[,LATENCY[,JITTER[,LOSS]]], such as 100mbit,40ms.")]


def run(
    program: Annotated[list[str] | None, typer.Argument(help="Your script, then its own arguments.")] = None,
    hosts: Annotated[int, typer.Option(help="Emulated hosts.")] = 4,
    link: RunLink = "1gbit",
    between: options.Between = None,
    nproc_per_host: Annotated[int, typer.Option(help="Processes per host.")] = 1,
    module: Annotated[bool, typer.Option("-m", help="The script is a module, as for python -m.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Do not stop when a rank fails; exit code 0 if any succeeds.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Give each host one core of this machine, in turn.")] = False,
) -> None:
    """Run a torchrun script on emulated hosts joined by links of a given speed (needs root)."""
    command = _command(program or [], module)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with Cluster(hosts, link, between) as cluster:
        if hosts * nproc_per_host > (cores := len(os.sched_getaffinity(0))):
            say(f"{hosts} hosts share {cores} cores: computing takes longer than on machines of their own")
        begun = time.monotonic()
        with Programs(cluster, command, nproc_per_host, pin) as programs:
            failed = _waited(programs, keep_going)
        seconds = time.monotonic() - begun
        sent = ", ".join(words.nbytes(cluster.sent_nbytes(host)) for host in range(hosts))
    say(f"{seconds:.1f} s from starting Python to its end; sent by each host, over {link}: {sent}")
    if failed is not None:
        say(f"laconic: {failed}; {'no rank ended well' if keep_going else 'the other ranks were stopped'}")
        raise typer.Exit(failed.code)


def _waited(programs: Programs, keep_going: bool) -> Failed | None:
    try:
        failed = programs.wait(keep_going=keep_going)
        if failed is not None:
            programs.stop()
        return failed
    except KeyboardInterrupt:
        programs.stop(signal.SIGINT)
        raise typer.Exit(130) from None
    except SystemExit:
        programs.stop()
        raise


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _command(program: list[str], module: bool) -> list[str]:
    """The script as Python starts it; what is not there is refused before anything is started."""
    if not program:
        raise BadInput("name a script: laconic run --hosts 4 --link 100mbit train.py; or a module with -m")
    name = program[0]
    python = [sys.executable, "-u"]  # lines are shown as they are printed
    if not module:
        if not Path(name).is_file():
            raise BadInput(f"there is no script '{name}'; a module is started with -m")
        return [*python, *program]
    if "" not in sys.path:
        sys.path.insert(0, "")  # where `python -m` looks first
    if not all(part.isidentifier() for part in name.split(".")) or importlib.util.find_spec(name.split(".")[0]) is None:
        raise BadInput(f"there is no module '{name}'; a script is started without -m")
    return [*python, "-m", *program]
