"""Kill, stop and start the workers of an elastic job for as long as it takes, and check that nothing was lost.

    python benchmarks/soak_churn.py --kills 1000 --seed 1 --output benchmarks/results/churn.json

Everything is real: processes, SIGKILL, SIGSTOP, sockets. Faults are drawn from a seed: a worker or the coordinator is
killed, a newcomer is killed while it joins, the coordinator is killed while somebody joins, two workers are killed at
once, a worker or the coordinator is stopped and later continued, a worker leaves. Replacements come from a fork server.

What is checked, from what the workers wrote themselves after every committed step:
 - no gap between two committed steps is longer than 5 s;
 - workers that report the same step report the same checksum of all weights;
 - the weights count the samples: one parameter a sample, whose gradient is one where the sample is in the batch, so that
   after every epoch each of them must be the number of epochs; a lost sample shows as one less, a doubled one as more;
 - no committed step that anybody has seen is missing from those who go on;
 - one worker is never killed, only stopped: its file descriptors, threads and memory stay level.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import laconic
from laconic.consistency.churn.meeting import read_events

SAMPLES, BATCH = 2048, 32
LONGEST_GAP_S = 5.0
# Seconds from SIGKILL to the next committed step, measured on other systems with their default settings.
PEERS = {"torchft": 5.0, "hivemind": 1.1}
FAULTS = {
    "kill worker": 30,
    "kill coordinator": 20,
    "kill newcomer": 12,
    "kill coordinator during a join": 8,
    "kill two": 8,
    "stop worker": 8,
    "stop coordinator": 6,
    "leave": 8,
}
KILLS = {"kill worker": 1, "kill coordinator": 1, "kill newcomer": 1, "kill coordinator during a join": 1, "kill two": 2}


# one worker


class Counting(nn.Module):
    """A small network, and one number a sample that counts how often the sample was used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.uses = nn.Parameter(torch.zeros(SAMPLES))
        self.network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))


def work(folder: str, name: str, workers: int) -> None:
    """Train until told to leave by SIGTERM; a line of JSON after every committed step."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the fork server, even when stopped
    torch.set_num_threads(1)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    model = Counting()
    groups = [{"params": [model.uses], "lr": float(BATCH), "momentum": 0.0}, {"params": model.network.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 32, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)
    with open(Path(folder, "logs", name), "w", buffering=1) as log:
        print(json.dumps({"ready": time.monotonic()}), file=log)
        job = laconic.elastic(
            model, optimizer, dataset_size=SAMPLES, batch=BATCH, meeting=Path(folder, "meeting"), epochs=10**6,
            workers=workers,
        )  # fmt: skip
        with job:
            for batch in job.batches():
                epoch = job.epoch
                loss = nn.functional.cross_entropy(model.network(x[batch]), y[batch]) - model.uses[batch].mean()
                loss.backward()
                if job.step():
                    line: dict[str, Any] = {"t": time.monotonic(), "step": job.steps, "view": job.view, "id": job.worker}
                    line |= {"members": job.members, "digest": job.digest, "rejoined": job.rejoined}
                    if job.epoch != epoch:
                        wrong = (model.uses.detach() - job.epoch).abs().max().item()
                        line |= {"epoch": job.epoch, "wrong": wrong}
                    print(json.dumps(line), file=log)
                if told:
                    break


# the party


@dataclass
class Worker:
    """A process, and what it has written so far."""

    name: str
    process: Any
    log: Path
    started: float
    offset: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    ready: float | None = None
    first: dict[str, Any] | None = None


class Party:
    """All workers of a soak, and everything they report."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        (folder / "logs").mkdir(parents=True)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "laconic.consistency.churn.job"])
        self.workers: list[Worker] = []
        self.gone: list[Worker] = []
        self.commits: dict[int, tuple[float, int]] = {}  # step → when first seen committed, and in which view
        self.digests: dict[int, dict[int, set[str]]] = {}  # step → checksum → who reported it
        self.killed_together: list[set[str]] = []
        self.epochs: dict[int, float] = {}
        self.problems: list[str] = []
        self.newest: dict[str, Any] = {}
        self.joins: list[float] = []
        self.usage: list[dict[str, int]] = []
        self._started = 0

    def start(self) -> Worker:
        """One worker more."""
        self._started += 1
        name = f"worker{self._started}"
        process = self.context.Process(target=work, args=(str(self.folder), name, self.size), daemon=True)
        process.start()
        worker = Worker(name, process, self.folder / "logs" / name, time.monotonic())
        self.workers.append(worker)
        return worker

    def look(self) -> None:
        """Take in what the workers have written."""
        for worker in self.workers:
            self._read(worker)

    def _read(self, worker: Worker) -> None:
        if not worker.log.exists():
            return
        with open(worker.log, "rb") as file:
            file.seek(worker.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        worker.offset += len(whole)
        for text in whole.splitlines():
            line = json.loads(text)
            if "ready" in line:
                worker.ready = line["ready"]
            else:
                self._note(worker, line)

    def _note(self, worker: Worker, line: dict[str, Any]) -> None:
        step = line["step"]
        if worker.first is None and worker.ready is not None:
            worker.first = line
            self.joins.append(line["t"] - worker.ready)
        worker.last = line
        self.digests.setdefault(step, {}).setdefault(line["digest"], set()).add(worker.name)
        when, view = self.commits.get(step, (line["t"], line["view"]))
        self.commits[step] = (min(when, line["t"]), max(view, line["view"]))
        if "wrong" in line:
            self.epochs[line["epoch"]] = max(line["wrong"], self.epochs.get(line["epoch"], 0.0))
        if (line["view"], step) > (self.newest.get("view", 0), self.newest.get("step", 0)):
            self.newest = line

    def until(self, done: Any, what: str, limit_s: float = LONGEST_GAP_S) -> bool:
        """Look until `done()`; a problem when that takes too long."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                self.problems.append(f"not within {limit_s:g} s: {what}")
                return False
            self.look()
            time.sleep(0.004)
        return True

    @property
    def coordinator(self) -> Worker | None:
        """The worker that coordinates the newest view, as far as it has written."""
        first = self.newest.get("members", [0])[0]
        return next((w for w in self.workers if w.last.get("id") == first), None)

    @property
    def trained(self) -> list[Worker]:
        """The living workers that have made a step."""
        return [w for w in self.workers if w.last and w.process.is_alive()]

    def remove(self, worker: Worker) -> None:
        """Take in the last words of a worker that is gone."""
        worker.process.join(timeout=5)
        self._read(worker)
        self.workers.remove(worker)
        self.gone.append(worker)
        worker.process.close()

    def close(self) -> None:
        """End every worker, the stopped ones too."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join(timeout=5)


# faults


@dataclass(frozen=True)
class Recovery:
    """How long after a fault the next step was committed by those who went on."""

    fault: str
    seconds: float
    workers: int


class Soak:
    """A seeded series of faults."""

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        self.party, self.size = Party(folder, size), size
        self.random = random.Random(seed)
        self.recoveries: list[Recovery] = []
        self.faults: collections.Counter[str] = collections.Counter()
        self.kills = 0
        for _ in range(size):
            self.party.start()
        self.anchor = self.party.workers[-1]  # only ever stopped
        self.party.until(lambda: len(self.party.trained) == size, "the first step of all workers", 150.0)
        self.begun = time.monotonic()

    def run(self, kills: int, limit_s: float) -> None:
        """Faults until `kills` processes were killed, or the time is up, or something is wrong."""
        while self.kills < kills and time.monotonic() - self.begun < limit_s and not self.party.problems:
            fault = self.random.choices(list(FAULTS), list(FAULTS.values()))[0]
            self.faults[fault] += 1
            getattr(self, "_" + fault.replace(" ", "_"))(fault)
            self.kills += KILLS.get(fault, 0)
            self._refill()
            self._measure_usage()

    def _victims(self, count: int = 1) -> list[Worker]:
        """Workers that may be killed: neither the anchor nor so many that nobody is left."""
        coordinator = self.party.coordinator
        others = [w for w in self.party.trained if w is not self.anchor and w is not coordinator]
        return self.random.sample(others, min(count, len(others)))

    def _kill(self, fault: str, victims: list[Worker]) -> None:
        """SIGKILL; then wait for a step that was committed without them."""
        victims = [v for v in victims if v is not None]
        numbers = {v.last.get("id", -1) for v in victims}
        if len(victims) > 1:
            self.party.killed_together.append({v.name for v in victims})
        for victim in victims:
            os.kill(victim.process.pid, signal.SIGKILL)
        self._recover(fault, numbers, time.monotonic())
        for victim in victims:
            self.party.remove(victim)

    def _recover(self, fault: str, numbers: set[int], since: float) -> None:
        party = self.party
        seen: list[float] = []

        def again() -> bool:
            for worker in party.workers:
                line = worker.last
                if line and line["t"] > since and not numbers & set(line["members"]):
                    seen.append(line["t"])
            return bool(seen)

        if party.until(again, f"a step after '{fault}' (view {party.newest.get('view')})"):
            self.recoveries.append(Recovery(fault, min(seen) - since, len(party.newest["members"])))

    def _kill_worker(self, fault: str) -> None:
        self._kill(fault, self._victims())

    def _kill_two(self, fault: str) -> None:
        coordinator = self.party.coordinator
        victims = self._victims(2)
        if coordinator is not self.anchor and self.random.random() < 0.5:
            victims = [coordinator, *victims[:1]]
        self._kill(fault, victims)

    def _kill_coordinator(self, fault: str) -> None:
        if self.party.coordinator is self.anchor:  # it must not die; once stopped it comes back as the youngest
            return self._stop(fault, self.anchor)
        self._kill(fault, [self.party.coordinator])

    def _kill_newcomer(self, fault: str) -> None:
        newcomer = self.party.start()
        if self.random.random() < 0.7:  # in the middle of its join, else while it starts
            self.party.until(lambda: newcomer.ready is not None, "a newcomer is ready", 120.0)
            time.sleep(self.random.random() * 0.06)
        else:
            time.sleep(self.random.random() * 0.1)
        self.party.look()
        self._kill(fault, [newcomer])

    def _kill_coordinator_during_a_join(self, fault: str) -> None:
        newcomer = self.party.start()
        self.party.until(lambda: newcomer.ready is not None, "a newcomer is ready", 120.0)
        time.sleep(self.random.random() * 0.06)
        self.party.look()
        self._kill_coordinator(fault)

    def _stop_worker(self, fault: str) -> None:
        self._stop(fault, self.random.choice([*self._victims(), self.anchor]))

    def _stop_coordinator(self, fault: str) -> None:
        self._stop(fault, self.party.coordinator)

    def _stop(self, fault: str, victim: Worker | None) -> None:
        """SIGSTOP, wait until the others go on, SIGCONT, wait until it is in step again."""
        if victim is None:
            return
        number = victim.last["id"]
        os.kill(victim.process.pid, signal.SIGSTOP)
        self._recover(fault, {number}, time.monotonic())
        time.sleep(self.random.random() * 0.5)
        os.kill(victim.process.pid, signal.SIGCONT)
        self.party.until(lambda: victim.last["id"] != number, f"{victim.name}, fenced, is in step under a new number")

    def _leave(self, fault: str) -> None:
        for victim in self._victims():
            number, since = victim.last["id"], time.monotonic()
            os.kill(victim.process.pid, signal.SIGTERM)
            self._recover(fault, {number}, since)
            self.party.remove(victim)

    def _refill(self) -> None:
        """Start who is missing; now and then do not wait until they are in step."""
        for _ in range(self.size - len(self.party.workers)):
            self.party.start()
        if self.random.random() < 0.8 or len(self.party.trained) < 3:
            size = self.size
            self.party.until(lambda: len(self.party.trained) >= size, "a newcomer makes a step", 120.0)
        for worker in [w for w in self.party.workers if not w.process.is_alive()]:
            self.party.problems.append(f"{worker.name} ended by itself with {worker.process.exitcode}")

    def _measure_usage(self) -> None:
        place = Path("/proc", str(self.anchor.process.pid))
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        self.party.usage.append(
            {
                "files": len(list((place / "fd").iterdir())),
                "threads": int(status["Threads"]),
                "resident_nbytes": int(status["VmRSS"].split()[0]) * 1024,
                "view": self.party.newest["view"],
            }
        )


# the verdict


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile and the greatest."""
    ordered = sorted(values) or [float("nan")]
    at = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.9, 0.99)]
    return {"count": len(values), "median": at[0], "p90": at[1], "p99": at[2], "max": ordered[-1]}


def verdict(soak: Soak) -> dict[str, Any]:
    """What was measured, and everything that is wrong."""
    party, problems = soak.party, list(soak.party.problems)
    steps = sorted(party.commits)
    times = [party.commits[step][0] for step in steps]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    if gaps and max(gaps) > LONGEST_GAP_S:
        problems.append(f"{max(gaps):.2f} s without a committed step")
    missing = set(range(1, max(steps, default=0) + 1)) - set(steps)
    if missing:
        problems.append(f"{len(missing)} steps were reported by nobody, the first is {min(missing)}")
    for epoch, wrong in party.epochs.items():
        if wrong > 0.01:
            problems.append(f"after epoch {epoch} a sample was used {wrong:+.3f} times too often or too seldom")
    differing = {step: by_digest for step, by_digest in party.digests.items() if len(by_digest) > 1}
    lost_with_two = 0
    for step, by_digest in differing.items():
        # Two workers hold a step before anybody may rely on it. When both are killed at once it is done again.
        losers = sorted(by_digest.values(), key=len)[:-1]
        if all(any(names <= pair for pair in party.killed_together) for names in losers):
            lost_with_two += 1
        else:
            told = [sorted(names) for names in by_digest.values()]
            problems.append(f"step {step}: workers hold different weights, {told}")
    events = read_events(party.folder / "meeting")
    by_view = collections.defaultdict(list)
    for event in events:
        by_view[event["view"]].append(event["what"])
    stalls = _stalls(party, {v for v, what in by_view.items() if all(each == "joined" for each in what)})
    usage = party.usage
    quarter = max(1, len(usage) // 4)
    level = {
        key: [statistics.median(u[key] for u in usage[:quarter]), statistics.median(u[key] for u in usage[-quarter:])]
        for key in ("files", "threads", "resident_nbytes")
    } if usage else {}
    for key, (early, late) in level.items():
        if len(usage) >= 20 and late > early * 1.25 + 4:
            problems.append(f"{key} grew from {early:g} to {late:g}")
    recoveries = collections.defaultdict(list)
    for each in soak.recoveries:
        recoveries[each.fault].append(each.seconds)
    killed = [each.seconds for each in soak.recoveries if each.fault.startswith("kill")]
    return {
        "problems": problems,
        "kills": soak.kills,
        "faults": dict(soak.faults),
        "seconds": time.monotonic() - soak.begun,
        "steps": len(steps),
        "views": party.newest.get("view"),
        "epochs_checked": len(party.epochs),
        "steps_compared": sum(1 for d in party.digests.values() if len(set().union(*d.values())) > 1),
        "steps_lost_with_two_workers": lost_with_two,
        "step_s": quantiles(gaps),
        "recovery_after_a_kill_s": quantiles(killed),
        "recovery_by_fault_s": {fault: quantiles(values) for fault, values in sorted(recoveries.items())},
        "ready_to_first_step_s": quantiles(party.joins[soak.size :]),
        "stall_of_survivors_at_a_join_s": quantiles(stalls),
        "anchor_first_and_last_quarter": level,
        "events": dict(collections.Counter(event["what"].split(" for ")[0] for event in events)),
        "recoveries": [[each.fault, round(each.seconds, 5)] for each in soak.recoveries],
    }


def _stalls(party: Party, views: set[int]) -> list[float]:
    """How much longer than a usual step the first step of each of these views took."""
    ordered = sorted((step, when, view) for step, (when, view) in party.commits.items())
    pairs = list(zip(ordered, ordered[1:], strict=False))
    usual = statistics.median([b[1] - a[1] for a, b in pairs]) if pairs else 0.0
    return [max(0.0, b[1] - a[1] - usual) for a, b in pairs if b[2] != a[2] and b[2] in views]


def report(found: dict[str, Any]) -> str:
    """The verdict as text."""
    rows = [("all kills", found["recovery_after_a_kill_s"]), *found["recovery_by_fault_s"].items()]
    lines = [
        f"{found['kills']} kills among {sum(found['faults'].values())} faults in {found['seconds']:.0f} s: "
        f"{found['steps']} steps, {found['views']} views, {found['epochs_checked']} epochs accounted for",
        "seconds to the next committed step            count  median    p90    p99    max",
    ]
    lines += [
        f"  {name:42} {q['count']:6} {q['median']:7.3f} {q['p90']:6.3f} {q['p99']:6.3f} {q['max']:6.3f}"
        for name, q in rows
    ]
    lines += [f"  {name + ', after SIGKILL (PEERS)':42} {'':6} {seconds:7.3f}" for name, seconds in PEERS.items()]
    for name in ("ready_to_first_step_s", "stall_of_survivors_at_a_join_s", "step_s"):
        q = found[name]
        lines.append(f"  {name:42} {q['count']:6} {q['median']:7.3f} {q['p90']:6.3f} {q['p99']:6.3f} {q['max']:6.3f}")
    for key, (early, late) in found["anchor_first_and_last_quarter"].items():
        lines.append(f"  {key} of the worker that lived through all: {early:g} → {late:g}")
    return "\n".join(lines + [f"PROBLEM: {problem}" for problem in found["problems"]])


def soak(kills: int, seed: int, size: int = 4, limit_s: float = 3600.0) -> dict[str, Any]:
    """Run a soak in a folder of its own, which is removed when all is well."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    running = Soak(folder, size, seed)
    try:
        running.run(kills, limit_s)
        found = verdict(running)
    finally:
        running.party.close()
    if not found["problems"]:
        shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = soak(options.kills, options.seed, options.workers, options.limit)
    print(report(found))
    if options.output is not None:
        from laconic.lab.codec_bench import environment  # not for the workers: they start quicker without

        setting = {"kills": options.kills, "seed": options.seed, "workers": options.workers}
        whole = {"environment": environment(), "setting": setting, "peers_s": PEERS, **found}
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
