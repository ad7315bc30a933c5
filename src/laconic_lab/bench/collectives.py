"""Measures every all-reduce algorithm beside the engine's own, and what `auto` would have picked.

Callers: `laconic bench collectives` and `laconic probe`; every rank runs these. Repeats of all algorithms are
interleaved, so that drift hits all alike; a time is the largest over the ranks; results are medians with a 95 %
interval by ranks.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from laconic import schedules
from laconic.exchange import costs
from laconic.exchange.collectives import all_reduce
from laconic.statistics import median
from laconic.transports.probe import probe
from laconic.transports.world import World, init
from laconic_lab.bench.turns import SECONDS, Turns, Way
from laconic_lab.environment import environment

NUMELS = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
CLOSE = 1.15  # `auto` is near enough when it takes at most this many times the best


def measure_link(quick: bool) -> str:
    """Join the job, probe its link, and return the profile as JSON text."""
    os.environ.pop("LACONIC_LINK", None)  # a probe makes a profile and needs none
    with init() as world:
        return probe(world.transport, quick=quick).to_json()


def measure(numels: list[int], seconds_per_size: float, quick_probe: bool) -> dict[str, Any]:
    """Join the job, probe its link, then measure: the record that `laconic bench collectives --json` prints."""
    with init() as world:
        profile = probe(world.transport, quick=quick_probe)
        world.profile = profile
        names = costs.candidates(world)
        results, picks = [], []
        for numel in numels:
            rows = _measure_size(world, numel, names, seconds_per_size)
            results += rows
            picks.append(_judge(costs.pick(world, 4 * numel), numel, rows))
        return {
            "engine": world.engine,
            "world_size": world.world_size,
            "link": profile.link.to_dict(),
            "fit_relative_rms": profile.relative_rms,
            "results": results,
            "auto": picks,
            "summary": _summary(picks),
            "environment": environment(),
        }


def _measure_size(world: World, numel: int, names: list[str], budget_s: float) -> list[dict[str, Any]]:
    values = torch.full((numel,), float(world.rank + 1))
    expected = world.world_size * (world.world_size + 1) / 2
    work = torch.empty_like(values)
    for name in names:  # warm-up, and every result checked
        work.copy_(values)
        all_reduce(work, algorithm=name, group=world)
        if not bool((work == expected).all()):
            raise ArithmeticError(f"[rank {world.rank}] {name} gave a wrong sum at {numel} values")
    ways = {
        name: Way(partial(all_reduce, work, algorithm=name, group=world), prepare=partial(work.copy_, values))
        for name in names
    }  # fmt: skip
    turns = Turns(ways, together=partial(all_reduce, torch.zeros(1), algorithm="butterfly", group=world))
    (once,) = _largest(world, [sum(turns.block(name)[SECONDS] for name in names)])
    found = turns.run(int(min(101, max(5, budget_s / once))), warm_up=0)
    return [_row(world, name, numel, _largest(world, found[name][SECONDS])) for name in names]


def _largest(world: World, values: list[float]) -> list[float]:
    """Each value's largest over the ranks."""
    return all_reduce(torch.tensor(values, dtype=torch.float64), "max", algorithm="tree", group=world).tolist()


def _row(world: World, name: str, numel: int, times: list[float]) -> dict[str, Any]:
    assert world.profile is not None
    centre = median(times)
    row: dict[str, Any] = {
        "engine": world.engine,
        "algorithm": name,
        "numel": numel,
        "seconds": centre.value,
        "seconds_interval": [centre.low, centre.high],
        "predicted_seconds": world.profile.seconds(name, world.world_size, 4 * numel),
        "repeats": len(times),
        "sent_nbytes": None,
        "rounds": None,
        "model_seconds": None,
    }
    if name != costs.NATIVE:
        schedule = schedules.build("all_reduce", name, world.world_size, numel)
        row["sent_nbytes"], row["rounds"] = 4 * schedule.sent_numel, schedule.rounds
        row["model_seconds"] = schedules.cost(schedule, world.profile.link)
    return row


def _judge(pick: str, numel: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How `auto`'s pick compares with the best measured algorithm, and with the engine's own."""
    seconds = {row["algorithm"]: row["seconds"] for row in rows}
    best = min(seconds, key=lambda name: seconds[name])
    native = seconds.get(costs.NATIVE)
    return {
        "numel": numel,
        "pick": pick,
        "best": best,
        "ratio_to_best": seconds[pick] / seconds[best],
        "ratio_to_native": None if native is None else seconds[pick] / native,
    }


def _summary(picks: list[dict[str, Any]]) -> dict[str, Any]:
    close = sum(pick["ratio_to_best"] <= CLOSE for pick in picks)
    large = [p["ratio_to_native"] for p in picks if p["numel"] >= 1_000_000 and p["ratio_to_native"] is not None]
    return {
        "auto_within_15_percent_of_best": f"{close} of {len(picks)}",
        "auto_worst_ratio_to_native_from_1e6": max(large) if large else None,
    }
