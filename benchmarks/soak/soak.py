"""Kill, stop and start the workers of an elastic job for as long as it takes, and check that nothing was lost.

    python -m benchmarks soak --kills 1000 --seed 1 --output benchmarks/results/soak.json

Everything is real: processes, SIGKILL, SIGSTOP, sockets. Faults are drawn from a seed: a worker or the coordinator is
killed, a newcomer is killed while it joins, the coordinator is killed while somebody joins, two workers are killed at
once, a worker or the coordinator is stopped and later continued, a worker leaves. Replacements come from a fork server.
What the workers report is in `workers.py`, what is made of it in `verdict.py`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.verdict import PEERS, report, verdict
from benchmarks.soak.workers import Party, Worker

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


@dataclass(frozen=True)
class Recovery:
    """How long after a fault the next step was committed by those who went on."""

    fault: str
    seconds: float
    workers: int


class Soak:
    """A seeded series of faults."""

    def __init__(self, folder: Path, size: int, seed: int, **options: Any) -> None:
        self.party, self.size = Party(folder, size, options), size
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
            self._refill()
            self._measure_usage()

    def _victims(self, count: int = 1) -> list[Worker]:
        """Workers that may be killed: neither the anchor nor so many that nobody is left."""
        coordinator = self.party.coordinator
        others = [w for w in self.party.trained if w is not self.anchor and w is not coordinator]
        return self.random.sample(others, min(count, len(others)))

    def _kill(self, fault: str, victims: list[Worker]) -> None:
        """SIGKILL; then wait for a step that was committed without them."""
        self.kills += len(victims)
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
        if coordinator not in (None, self.anchor) and self.random.random() < 0.5:
            victims = [coordinator, *victims[:1]]
        self._kill(fault, victims)

    def _kill_coordinator(self, fault: str) -> None:
        coordinator = self.party.coordinator
        if coordinator is self.anchor:  # it must not die; once stopped it comes back as the youngest
            self._stop("stop coordinator", self.anchor)
        elif coordinator is not None:
            self._kill(fault, [coordinator])

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


def soak(kills: int, seed: int, size: int = 4, limit_s: float = 3600.0, **options: Any) -> dict[str, Any]:
    """Run a soak, with `options` of `laconic.elastic`, in a folder of its own, which is removed when all is well."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    running = Soak(folder, size, seed, **options)
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
    parser.add_argument("--codec", default="none", help="what workers send goes through it")
    parser.add_argument("--consistency", default="sync", help="sync, local(8), block_momentum(8, momentum=0), robust")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    trained = {"codec": options.codec, "consistency": options.consistency}
    found = soak(options.kills, options.seed, options.workers, options.limit, **trained)
    print(report(found))
    if options.output is not None:
        from laconic_lab.environment import environment  # not for the workers: they start quicker without it

        setting = {"kills": options.kills, "seed": options.seed, "workers": options.workers, **trained}
        load = {"load_average_at_the_end": os.getloadavg(), "nice": os.nice(0)}
        whole = {"environment": environment(), **load, "setting": setting, "peers_s": PEERS, **found}
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit(1 if found["problems"] else 0)
