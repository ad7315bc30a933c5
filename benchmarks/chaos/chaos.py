"""Play scenarios until the time is up; print a table with zeros where zeros belong, else end with exit code 1.

    python -m benchmarks chaos --minutes 18 --seed 1 --output benchmarks/results/chaos.json
    python -m benchmarks chaos --faults kill --number 4 --verbose

The time is divided evenly among the kinds of fault: the next scenario is of the kind that has had least. Their order is
a function of the seed, so a failure is played again with its `--faults` and `--number`. With `--resume` a run goes on
where the one before it, with the same seed, has written its output: what was played is not played again, and counts;
what failed is, and stays in the record under "again".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos import table
from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.faults import all_faults
from benchmarks.chaos.judge import FAILURES, HUNG, LOST, SKIPPED, Verdict
from benchmarks.chaos.scenario import FILES, Scenario, scenarios
from benchmarks.chaos.stage import Failed, Fault, Skipped, Stage, without_codec_if_refused
from laconic.transports.launcher import start_fork_server

LONGEST_S = 40.0  # what a scenario may still take when the time is nearly up, unless others of its engine took longer
LATE = "the time was up"
HUNG_S = 240.0  # longer than several jobs and their time-outs take


class Chaos:
    """Lanes that play scenarios side by side, most of which wait."""

    def __init__(self, faults: Sequence[Fault], options: argparse.Namespace, ends: float) -> None:
        self.options, self.stage = options, Stage()
        self._played: dict[Scenario, float] = {}  # now, one in each lane, and since when
        self._longest: dict[str, float] = {}  # by engine
        self.results: list[table.Result] = []
        self.absent = {fault.name: why for fault in faults if (why := fault.absent())}
        self.faults = [fault for fault in faults if fault.name not in self.absent]
        self.spent = {fault.name: 0.0 for fault in self.faults}
        self._before: set[Scenario] = set()
        self.again: list[str] = []
        self._lock = threading.Lock()
        self._orders = {f.name: scenarios(f, options.seed) for f in self.faults}
        self._heads = {name: next(order) for name, order in self._orders.items()}
        self._ends, self._over = ends, False

    def resume(self, results: Sequence[table.Result]) -> None:
        """Take over what was played before; what failed, or was not over when the time was up, is played again."""
        self.results += [each for each in results if each.verdict.column not in FAILURES and each.verdict.why != LATE]
        self.again = [f"{each.verdict.column}: {each.scenario}: {each.verdict.why}" for each in table.failures(results)]
        self._before = {each.scenario for each in self.results}
        for each in self.results:
            if each.scenario.fault in self.spent:
                self.spent[each.scenario.fault] += each.seconds

    def _next(self) -> tuple[Fault, Scenario] | None:
        """The next scenario of the kind that has had least time; None when the time is up.

        MPI's ranks wait by spinning: while one such job runs, the next kind has its turn.
        """
        while True:
            with self._lock:
                busy = any(each.engine == "mpi" for each in self._played)
                left_s, waits = self._ends - time.monotonic(), False
                for fault in sorted(self.faults, key=lambda each: self.spent[each.name]):
                    scenario = self._heads[fault.name]
                    if left_s < self._longest.get(scenario.engine, LONGEST_S):
                        continue
                    if not (busy and scenario.engine == "mpi"):
                        return fault, self._take(fault)
                    waits = True
            if not waits:
                return None
            time.sleep(0.2)

    def _take(self, fault: Fault) -> Scenario:
        scenario, self._heads[fault.name] = self._heads[fault.name], next(self._orders[fault.name])
        if self._is_asked_for(scenario):
            self._played[scenario] = time.monotonic()
            self.spent[fault.name] += 0.1  # so that the other lane takes another kind
        else:
            self.spent[fault.name] += 1e-6
        return scenario

    def run(self) -> None:
        """Play until the time is up, in as many lanes as asked for; a scenario that is not over by then has hung."""
        lanes = [threading.Thread(target=self._lane, daemon=True) for _ in range(self.options.lanes)]
        for lane in lanes:
            lane.start()
        with contextlib.suppress(KeyboardInterrupt):  # what has been played counts
            for lane in lanes:
                lane.join(max(0.0, self._ends - time.monotonic()))
        with self._lock:
            self._over = True
            for scenario, begun in self._played.items():
                seconds = time.monotonic() - begun
                hung, late = Verdict(HUNG, "the scenario did not end"), Verdict(SKIPPED, LATE)
                self.results.append(table.Result(scenario, hung if seconds > HUNG_S else late, seconds))

    def _lane(self) -> None:
        while (chosen := self._next()) is not None:
            fault, scenario = chosen
            if self._is_asked_for(scenario):
                self.play(fault, scenario)
            if self.options.number is not None and scenario.number >= self.options.number:
                return

    def _is_asked_for(self, scenario: Scenario) -> bool:
        asked = self.options
        fits = scenario.door in asked.doors and asked.only in str(scenario) and scenario not in self._before
        return fits and asked.number in (None, scenario.number)

    def play(self, fault: Fault, scenario: Scenario) -> None:
        """Play one, and keep its result."""
        verdict = self._verdict(fault, scenario)
        verdict = Verdict(verdict.column, verdict.why.replace(f"{self.stage.folder}/", ""))
        with self._lock:
            if self._over:  # what was left of it has been ended, which is no verdict
                return
            result = table.Result(scenario, verdict, time.monotonic() - self._played.pop(scenario))
            longest = self._longest.get(scenario.engine, LONGEST_S)
            self._longest[scenario.engine] = max(longest, 1.2 * result.seconds)
            self.spent[fault.name] += result.seconds
            self.results.append(result)
        if verdict.column in FAILURES or self.options.verbose:
            print(f"{verdict.column:9} {result.seconds:5.1f} s  {scenario}: {verdict.why}", flush=True)

    def _verdict(self, fault: Fault, scenario: Scenario) -> Verdict:
        try:
            return without_codec_if_refused(lambda each: fault.play(each, self.stage), scenario)
        except Skipped as reason:
            return Verdict(SKIPPED, str(reason))
        except Failed as failed:
            return failed.verdict
        except Exception:
            return Verdict(LOST, f"the suite itself failed: {traceback.format_exc()[-600:]}")


def warm() -> None:
    """Compile kernels ahead, in a process of its own: a rank that compiles is late, as if it were stopped.

    Those of codecs, rules and sparse sums; what `laconic warm` compiles after them is no part of any job here.
    """
    words = "import itertools; from laconic.ahead import compile_all as all; "
    words += "list(itertools.takewhile(lambda name: name != 'dsar', all()))"
    subprocess.run([sys.executable, "-c", words], check=True, stdout=subprocess.DEVNULL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    known = all_faults()
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=2, help="scenarios side by side")
    parser.add_argument("--faults", nargs="+", default=[fault.name for fault in known])
    parser.add_argument("--doors", nargs="+", default=[*DOORS, FILES])
    parser.add_argument("--only", default="", help="only scenarios whose line contains this, such as 'in wire: '")
    parser.add_argument("--number", type=int, help="only this scenario of each fault")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on with the run that is in the output")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    warm()
    start_fork_server("benchmarks.chaos.program")
    chosen = [each for each in known if each.name in options.faults and not set(each.doors).isdisjoint(options.doors)]
    chaos = Chaos(chosen, options, begun + 60 * options.minutes)
    before_s = 0.0
    if options.resume and options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
        chaos.resume([table.read(row) for row in record["scenarios"]])
        chaos.again = list(dict.fromkeys([*record.get("again", ()), *chaos.again]))
        before_s = record["seconds"]
    try:
        chaos.run()
    finally:
        chaos.stage.close()
    print(table.text(chaos.results, chaos.absent))
    if options.output is not None:
        from laconic_lab.environment import environment

        setting = {"minutes": options.minutes, "seed": options.seed, "lanes": options.lanes}
        spent = {"seconds": round(before_s + time.monotonic() - begun, 1), "load_average": os.getloadavg()}
        found = table.as_json(chaos.results, chaos.absent)
        whole = {"environment": environment(), "setting": setting, **spent, "again": chaos.again, **found}
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if table.is_well(chaos.results, chaos.absent, [fault.name for fault in chosen]) else 1
