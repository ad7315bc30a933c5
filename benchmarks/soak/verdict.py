"""What a soak measured, and everything that went wrong in it.

Caller: `soak.py`. Checked, from what the workers wrote after every committed step: no gap between two committed
steps is longer than 5 s; workers that report the same step report the same checksum of all weights; every sample of
every epoch was used once; no step, or block of steps, is missing; file descriptors, threads and memory of the worker
that was never killed stay level.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from typing import Any

from benchmarks.soak.workers import LONGEST_GAP_S, Party, period
from laconic.consistency.elastic.meeting import read_events

# Seconds from SIGKILL to the next committed step, measured on other systems with their default settings.
PEERS = {"torchft": 5.0, "hivemind": 1.1}


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile and the greatest."""
    ordered = sorted(values) or [float("nan")]
    at = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.9, 0.99)]
    return {"count": len(values), "median": at[0], "p90": at[1], "p99": at[2], "max": ordered[-1]}


def verdict(soak: Any) -> dict[str, Any]:
    """What was measured, and everything that is wrong."""
    party, problems = soak.party, list(soak.party.problems)
    steps = sorted(party.commits)
    times = [party.commits[step][0] for step in steps]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    if gaps and max(gaps) > LONGEST_GAP_S:
        problems.append(f"{max(gaps):.2f} s without a committed step")
    apart = period(party.options)  # epochs are a whole number of blocks long
    missing = set(range(apart, max(steps, default=0) + 1, apart)) - set(steps)
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
        "events": dict(collections.Counter(_kind(event["what"]) for event in events)),
        "recoveries": [[each.fault, round(each.seconds, 5)] for each in soak.recoveries],
    }


def _kind(what: str) -> str:
    """An event without its particulars."""
    return "rejoined" if what.startswith("rejoined") else what.split(" for ")[0]


def _stalls(party: Party, views: set[int]) -> list[float]:
    """How much longer than a usual step the first step of each of these views took."""
    ordered = sorted((step, when, view) for step, (when, view) in party.commits.items())
    pairs = list(itertools.pairwise(ordered))
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
