"""Two sites behind routers, 40 ms apart, train shakespeare-gpt by elastic diloco through kills and an outage.

    python -m benchmarks two-sites --json benchmarks/results/two-sites.json             # needs root and iptables
    python -m benchmarks two-sites --short                                              # to see that it works

A worker at each site, behind a router that masquerades. They share no folder, and meet at a `laconic meet` that relays
on a third host. The same training is made undisturbed, and disturbed: by kills of the workers in turn, each of which
is started again, and by one outage of the meeting place and its relay. What is in the file already is not done again.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.optim.lr_scheduler import LambdaLR

import laconic
from benchmarks.chaos.meetings import MEET_PORT, RELAY_PORT, Server, meet
from laconic.errors import LaconicError
from laconic.storage import json_text
from laconic.storage.files import append, replace
from laconic.transports.launcher import LocalJob
from laconic.transports.zeromq_keys import KEY_VARIABLE, new_key
from laconic.workloads import get
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.environment import environment

WORKLOAD = "shakespeare-gpt"
LINK = "100mbit,20ms"  # from a site to the relay, and from there to the other: 40 ms one way
EPOCHS = 2  # the workload has fewer samples than all steps take
HOUSE = 2  # the host of the meeting place
AGAIN_S = 2.0  # after which a worker that was killed is started again
PATIENCE_S = 60.0
HOLD, SLOW_S = "hold", 0.3  # so long a step pauses while a kill is due and a worker is still coming back
LONGEST_S = 600.0  # without a committed step


@dataclass(frozen=True)
class Size:
    """How much is trained, and what happens meanwhile."""

    steps: int = 2000
    period: int = 20
    kills: int = 20
    outage_s: float = 60.0


SHORT = Size(120, 20, 2, 6.0)


def work(meeting: str, environment: dict[str, str], folder: str, site: int, seed: int, size: Size) -> None:
    """One worker, until the training is over; whoever holds the final model writes its loss."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    task = get(WORKLOAD).prepare(seed)
    plan, batch = task.workload.plan, task.global_batch(1)
    optimizer = task.optimizer(task.model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: plan(min(1.0, step / size.steps)))
    data = laconic.Samples(size.steps * batch // EPOCHS, batch, epochs=EPOCHS, seed=seed)
    notes, committed = Path(folder, f"site{site}.jsonl"), 0
    with laconic.elastic(
        task.model, optimizer, data, meeting, codec="dynamic8", consistency=f"diloco({size.period})", workers=2,
        scheduler=scheduler, patience_s=PATIENCE_S,
    ) as job:  # fmt: skip
        for numbers in job.batches():
            task.loss(task.model, task.batch_of(0, numbers)).backward()
            job.step()
            if Path(folder, HOLD).exists():
                time.sleep(SLOW_S)
            if job.steps != committed:
                committed = job.steps
                note = {"at": time.monotonic(), "pid": os.getpid(), "step": committed, "members": len(job.members)}
                append(notes, [json.dumps(note)])
        finished = job.finished
    if finished:
        replace(Path(folder, f"final{site}"), json.dumps(task.evaluate(task.model)["loss"]))


@dataclass
class Sites:
    """The two workers, and what they have noted."""

    cluster: Cluster
    arguments: tuple[Any, ...]
    folder: Path
    seed: int
    size: Size
    jobs: list[LocalJob[None]] = field(default_factory=list)

    def start(self, site: int) -> LocalJob[None]:
        """A worker of a site."""
        return self.cluster.start_on(site, work, (*self.arguments, str(self.folder), site, self.seed, self.size))

    def notes(self) -> list[dict[str, Any]]:
        """What both have noted, in the order of time."""
        paths = self.folder.glob("site*.jsonl")
        lines = (line for path in paths for line in path.read_text().splitlines())
        return sorted((json.loads(line) for line in lines), key=lambda note: float(note["at"]))

    def are_together(self) -> bool:
        """Whether both have committed a block with each other since they were started."""
        pids = {note["pid"] for note in self.notes() if note["members"] == 2}
        return all(job.processes[0].pid in pids for job in self.jobs)

    def revive(self) -> None:
        """Start again who has died, as systemd would, and say why one ended that was not killed."""
        for site, job in enumerate(self.jobs):
            code = job.processes[0].exitcode
            if code not in (None, 0):
                if code != -signal.SIGKILL:
                    typer.echo(f"site {site} ended: {job.outcomes(1.0)[0].error}", err=True)
                time.sleep(AGAIN_S)
                self.jobs[site] = self.start(site)


def trained(seed: int, size: Size, kills: int, outage_s: float) -> dict[str, Any]:
    """One training: its loss, its seconds, and those from each kill to the next committed block."""
    with tempfile.TemporaryDirectory() as place, Cluster(3, LINK, routed=2) as cluster:
        folder, key = Path(place), new_key().decode()
        house = meet(cluster, HOUSE, folder, key, relays=True)
        try:
            house.start()
            house.ready()
            address = cluster.address(HOUSE)
            known = {KEY_VARIABLE: key, "LACONIC_RELAY": f"{address}:{RELAY_PORT}"}
            sites = Sites(cluster, (f"tcp://{address}:{MEET_PORT}/sites", known), folder, seed, size)
            sites.jobs = [sites.start(site) for site in (0, 1)]
            return _disturbed(sites, house, kills, outage_s)
        finally:
            house.end()


def _disturbed(sites: Sites, house: Server, kills: int, outage_s: float) -> dict[str, Any]:
    """Watch a training to its end, and disturb it at steps that are spread evenly."""
    size, folder = sites.size, sites.folder
    due = [(size.steps * (number + 1) // (kills + 2), "kill") for number in range(kills)]
    due = sorted([*due, (size.steps // 2, "outage")] if outage_s else due)
    done: list[tuple[str, float]] = []
    begun = latest = time.monotonic()
    while not _is_over(sites):
        time.sleep(0.2)
        sites.revive()
        notes = sites.notes()
        step, latest = (notes[-1]["step"], notes[-1]["at"]) if notes else (0, latest)
        if time.monotonic() - latest > LONGEST_S:
            raise LaconicError(f"no block was committed for {LONGEST_S:g} s, after step {step}")
        is_due = bool(due) and step >= due[0][0]
        if is_due and not sites.are_together():
            (folder / HOLD).touch()
        if not is_due or not sites.are_together():
            continue
        (folder / HOLD).unlink(missing_ok=True)
        _, what = due.pop(0)
        done.append((what, time.monotonic()))
        if what == "kill":
            victim = sites.jobs[len(done) % 2].processes[0]
            victim.kill()
            victim.join(PATIENCE_S)  # else the next kill that is due may find both together still
        else:
            house.end()
            time.sleep(outage_s)
            house.start()
            house.ready()
    notes = sites.notes()
    waits = [
        (what, min((note["at"] - at for note in notes if note["at"] > at + (outage_s if what == "outage" else 0)),
                   default=float("nan")))
        for what, at in done
    ]  # fmt: skip
    losses = [json.loads(path.read_text()) for path in folder.glob("final*")]
    return {"loss": min(losses), "kills": sum(what == "kill" for what, _ in done), "outage_s": outage_s,
            "seconds": time.monotonic() - begun, "seconds_to_next_block": waits, "not_done": len(due),
            "steps": max(note["step"] for note in notes)}  # fmt: skip


def _is_over(sites: Sites) -> bool:
    ended = [job.processes[0].exitcode == 0 for job in sites.jobs]
    return any(sites.folder.glob("final*")) and all(ended)


Json = Annotated[Path | None, typer.Option("--json", help="Where to keep the figures; what is there is kept.")]
Seeds = Annotated[int, typer.Option(min=1, help="Trainings of each kind.")]
Short = Annotated[bool, typer.Option("--short", help="120 steps, 2 kills and 6 s, to see that it works.")]


def main(output: Json = None, seeds: Seeds = 1, short: Short = False) -> None:
    """Train undisturbed and disturbed, and compare the losses of the test set."""
    size = SHORT if short else Size()
    known: dict[str, Any] = {}
    if output is not None and output.exists():
        known = dict(json_text.parse(output.read_bytes()))  # type: ignore[call-overload]
    for seed in range(seeds):
        for name, kills, outage_s in (("undisturbed", 0, 0.0), ("disturbed", size.kills, size.outage_s)):
            key = f"seed {seed}, {size.steps} steps, {name}"
            if key not in known:
                known[key] = trained(seed, size, kills, outage_s)
            pairs = [
                known[f"{each.removesuffix(', disturbed')}, undisturbed"]["loss"] / known[each]["loss"]
                for each in known if each.endswith(", disturbed")
            ]  # fmt: skip
            known["disturbed_by_undisturbed"] = [1 / pair for pair in pairs]
            known["environment"] = environment()
            if output is not None:
                replace(output, json.dumps(known, indent=1) + "\n")
    typer.echo(json.dumps({key: value for key, value in known.items() if key != "environment"}, indent=1))
