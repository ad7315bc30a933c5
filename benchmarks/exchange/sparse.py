"""Sparse all-reduces beside the engine's dense one on an emulated cluster: where each is best, and what auto picks.

    python -m benchmarks sparse --hosts 4,8 --link 1gbit --output FILE

Needs root for the cluster (each host is a network namespace behind `tc tbf`); `--link loopback` runs local processes
without. Every rank selects the given share of the values at random places of its own. All algorithms of one density
take turns, so that a slow minute of the machine falls on all; a time is the slowest rank's, figures are medians with
the 95 % interval by ranks. Every result is checked: all ranks hold the same bits, and the exact ones equal each other
to the rounding of float32.

"dense" starts from a dense tensor that is there already and uses the engine's own all-reduce. The sparse ones end with
a stream; "to dense" is what writing it out as a tensor takes on top, where that is wanted. auto reckons with the rate
given (100 Gbit/s for loopback), the cost per message that a barrier shows, and work that takes as many times longer as
ranks outnumber cores; it knows how many values a rank selects, as after top-k.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import laconic
from laconic.exchange.costs import cheapest_sum, sparse_seconds
from laconic.exchange.sparse import SparseStream, sparse_all_reduce
from laconic.schedules import Link
from laconic.statistics import median
from laconic.transports.executor import run_native
from laconic_lab.bench.turns import SECONDS, Turns, Way, on_hosts, seconds_of, slowest
from laconic_lab.environment import environment

DENSE, CODED = "dense", "dsar+qsgd(4)"
EXACT = ("ssar_recursive_doubling", "ssar_split_allgather", "dsar")
CLOSE = 1.15  # auto is near enough when it takes at most this many times the best


def run_rank(numel: int, densities: list[float], repeats: int, seed: int, rate: str) -> dict[str, Any]:
    """One rank's part: measure each density."""
    with laconic.init(timeout_s=60) as world:
        crowd = max(1.0, world.world_size / (os.cpu_count() or 1))
        overhead_s = _message_s(world) / 2  # both ends are busy with it when ranks share cores
        link = replace(Link.parse(f"{rate},0us"), overhead_s=overhead_s, reduce_s_per_byte=0.25e-9 * crowd)
        rows = [_measure(world, numel, density, repeats, seed, link) for density in densities]
        return {"link": link.to_dict(), "rows": rows}


def _message_s(world: Any) -> float:
    """The time of one exchange of a byte: a barrier has ⌈log₂P⌉ of them in a row. The same on all ranks."""
    times = [seconds_of(partial(laconic.barrier, group=world)) for _ in range(41)]
    levels = max(1, (world.world_size - 1).bit_length())
    mine = torch.tensor([statistics.median(times) / levels], dtype=torch.float64)
    return float(laconic.all_reduce(mine, "max", algorithm="tree", group=world))


def _measure(world: Any, numel: int, density: float, repeats: int, seed: int, link: Any) -> dict[str, Any]:
    random = np.random.default_rng([seed, world.rank])
    indices = np.flatnonzero(random.random(numel, dtype=np.float32) < density)
    stream = SparseStream.of(indices, random.standard_normal(indices.size, dtype=np.float32), numel)
    values = stream.values[indices] if stream.dense else stream.values
    dense, work = stream.to_dense(), torch.empty(numel)
    transport, qsgd = world.transport, laconic.codec("qsgd(4)")

    def by(name: str) -> Callable[[], SparseStream]:
        codec, algorithm = qsgd if name == CODED else None, name.partition("+")[0]
        return lambda: sparse_all_reduce(SparseStream.of(indices, values, numel), transport, algorithm, codec)

    def whole() -> Tensor:
        run_native(work, transport)
        return work

    runs: dict[str, Callable[[], Any]] = {DENSE: whole, **{name: by(name) for name in (*EXACT, CODED)}}
    sent = {}
    for name, call in runs.items():  # warm-up, and every result checked
        work.copy_(dense)
        before = transport.counters.total_sent_nbytes
        result = call()
        sent[name] = transport.counters.total_sent_nbytes - before
        if name == DENSE:
            total = work.clone()
        _check(world, name, result, total)
    ways = {name: Way(call, prepare=partial(work.copy_, dense)) for name, call in runs.items()}
    times = Turns(ways, together=partial(laconic.barrier, group=world)).run(repeats, warm_up=0)
    union, out = runs["ssar_split_allgather"](), torch.empty(numel)
    count = round(density * numel)
    expected = sparse_seconds(world.world_size, count, numel, link)
    expected[CODED] = sparse_seconds(world.world_size, count, numel, link, qsgd)["dsar"]
    return {
        "density": density,
        "count": int(indices.size),
        "seconds": {name: figures[SECONDS] for name, figures in times.items()},
        "to_dense_seconds": [seconds_of(partial(union.to_dense, out)) for _ in range(repeats)],
        "sent_nbytes": sent,
        "predicted_seconds": expected,
        "pick": cheapest_sum(world.world_size, count, numel, link),
        "union_count": int(union.count),
    }


def _check(world: Any, name: str, result: Any, total: Tensor) -> None:
    """All ranks must hold the same bits; what is exact must be the dense sum but for the order of additions."""
    mine = result if isinstance(result, Tensor) else result.to_dense()
    digest = torch.tensor([int(mine.view(torch.int32).to(torch.int64).sum())])
    if len(set(laconic.all_gather(digest, group=world).flatten().tolist())) != 1:
        raise ArithmeticError(f"{name}: the ranks hold different sums")
    if name != CODED and not torch.allclose(mine, total, rtol=1e-5, atol=1e-5):
        raise ArithmeticError(f"{name}: not the dense sum")


def summary(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per density: the slowest rank's times, and how far auto's pick is from the best."""
    found = []
    for row in range(len(ranks[0]["rows"])):
        rows = [rank["rows"][row] for rank in ranks]
        algorithms = {}
        for name in rows[0]["seconds"]:
            times = slowest([r["seconds"] for r in rows], name)
            algorithms[name] = {
                "seconds": statistics.median(times),
                "seconds_interval": median(times).interval,
                "predicted_seconds": rows[0]["predicted_seconds"]["native" if name == DENSE else name],
                "sent_nbytes": sum(r["sent_nbytes"][name] for r in rows),
                "all_seconds": times,
            }
        pick = DENSE if rows[0]["pick"] in ("native", "ring") else rows[0]["pick"]
        exact = {name: algorithms[name]["seconds"] for name in (DENSE, *EXACT)}
        best = min(exact, key=lambda name: exact[name])
        found.append({
            "density": rows[0]["density"],
            "count": rows[0]["count"],
            "algorithms": algorithms,
            "to_dense_seconds": max(statistics.median(r["to_dense_seconds"]) for r in rows),
            "auto": pick,
            "best_exact": best,
            "auto_to_best": exact[pick] / exact[best],
            "auto_within_15_percent": exact[pick] <= CLOSE * exact[best],
            "dense_to_auto": exact[DENSE] / exact[pick],
        })  # fmt: skip
    return found


def table(record: dict[str, Any]) -> str:
    """The record for people: milliseconds, the best exact one of each line marked."""
    names = (DENSE, *EXACT, CODED)
    lines = ["P  density " + " ".join(f"{name:>24}" for name in names) + "  to dense  auto (× best)  dense/auto"]
    for world in record["worlds"]:
        for row in world["densities"]:
            cells = []
            for name in names:
                mark = "*" if name == row["best_exact"] else " "
                cells.append(f"{row['algorithms'][name]['seconds'] * 1e3:>23.1f}{mark}")
            verdict = f"{row['auto']} ({row['auto_to_best']:.2f})"
            lines.append(
                f"{world['hosts']:<2} {row['density']:>7.2%} " + " ".join(cells)
                + f"  {row['to_dense_seconds'] * 1e3:>8.1f}  {verdict}  {row['dense_to_auto']:.1f}"
            )  # fmt: skip
    return "\n".join([*lines, "times in ms; * = quickest of the exact ones"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="4,8")
    parser.add_argument("--link", default="1gbit", help="as laconic_lab.clusters.cluster takes it, or loopback")
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--densities", default="0.001,0.01,0.1")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    densities = [float(text) for text in options.densities.split(",")]
    rate = "100gbit" if options.link in ("loopback", "unlimited") else options.link
    task = (options.numel, densities, options.repeats, options.seed, rate)
    worlds = []
    for hosts in [int(text) for text in options.hosts.split(",")]:
        link = None if options.link == "loopback" else options.link
        ranks, _ = on_hosts(hosts, link, run_rank, task, options.timeout)
        worlds.append({"hosts": hosts, "reckoned_link": ranks[0]["link"], "densities": summary(ranks)})
    record = {
        "benchmark": "sparse all_reduce",
        "configuration": {**vars(options), "output": str(options.output), "warm_up": 1},
        "worlds": worlds,
        "environment": environment(),
    }
    print(table(record))
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0
