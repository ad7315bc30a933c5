"""One-sided beside two-sided: `async`, `hogwild` and asynchronous `gossip` by MPI windows and by messages.

    LACONIC_DATA=FOLDER python -m benchmarks rma --output FILE

Every configuration trains the same network from the same weights with the same batches for the same number of steps on
the ranks of one MPI job, float32 throughout; their order rotates with the seed. Steps are those of all workers together
per second, until the last has finished. Bytes are what the workers' records count: what a rank sent to others, or
one-sided what it read of them or added to them. Without LACONIC_DATA it trains on digits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import laconic
from laconic.errors import LaconicError
from laconic.storage.files import replace
from laconic.transports.mpi_launcher import run_mpi
from laconic.workloads.data import load
from laconic_lab.environment import environment

PAIRS = {  # two-sided → one-sided
    "async(replicas=0)": "async(rma=true)",
    "hogwild": "hogwild(rma=true)",
    "gossip(ring, asynchronous=true)": "gossip(ring, asynchronous=true, rma=true)",
}


def measure(data: str, hidden: int, batch: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """What every rank does; rank 0's rows are those of the job."""
    found = load(data)
    scale = 16.0 if data == "digits" else 255.0
    x, test_x = (split.x.reshape(len(split), -1).float() / scale for split in (found.train, found.test))
    y, test_y = found.train.y.long(), found.test.y.long()
    specs = [spec for pair in PAIRS.items() for spec in pair]
    turn = seed % len(specs)
    rows = []
    with laconic.init(timeout_s=120) as world:
        for spec in specs[turn:] + specs[:turn]:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 10))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            codec = None if "rma" in spec or spec == "hogwild" else "none"
            job = laconic.distribute(model, optimizer, consistency=spec, codec=codec)
            draw = torch.Generator().manual_seed(seed)
            laconic.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                chosen = torch.randint(len(x), (world.world_size, batch), generator=draw)[world.rank]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
            job.finish()
            seconds = time.perf_counter() - begun
            sent = torch.tensor([float(sum(record.sent_nbytes for record in job.records))], dtype=torch.float64)
            laconic.all_reduce(sent)
            with torch.no_grad():
                accuracy = 100 * float((model(test_x).argmax(1) == test_y).float().mean())
            staleness = [record.staleness for record in job.records if record.staleness is not None]
            job.close()
            rows.append({
                "configuration": spec, "seed": seed, "seconds": seconds,
                "steps_per_s": steps * world.world_size / seconds,
                "nbytes_per_step": float(sent) / (steps * world.world_size), "accuracy": accuracy,
                "staleness_of_rank_0": statistics.mean(staleness or [0]),
            })  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table = []
    for spec in (spec for pair in PAIRS.items() for spec in pair):
        each = [row for row in rows if row["configuration"] == spec]
        figures = {name: [row[name] for row in each] for name in ("steps_per_s", "nbytes_per_step", "accuracy")}
        table.append({
            "configuration": spec, "seeds": len(each),
            **{name: statistics.median(values) for name, values in figures.items()},
            "steps_per_s_range": [min(figures["steps_per_s"]), max(figures["steps_per_s"])],
        })  # fmt: skip
    return table


def lines(table: list[dict[str, Any]]) -> str:
    text = [f"{'configuration':44}{'steps/s':>10}{'least':>10}{'most':>10}{'kB a step':>12}{'accuracy':>10}"]
    for row in table:
        least, most = row["steps_per_s_range"]
        text.append(
            f"{row['configuration']:44}{row['steps_per_s']:10.0f}{least:10.0f}{most:10.0f}"
            f"{row['nbytes_per_step'] / 1e3:12.1f}{row['accuracy']:10.2f}"
        )
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="per worker")
    parser.add_argument("--steps", type=int, default=400, help="per worker")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="the record as JSON; to stdout without it")
    options = parser.parse_args()
    data = "mnist" if os.environ.get("LACONIC_DATA") else "digits"
    sizes = (data, options.hidden, options.batch, options.steps)
    rows: list[dict[str, Any]] = []
    loads = []
    try:
        for seed in range(options.seeds):
            loads.append(os.getloadavg()[0])
            rows += run_mpi(options.ranks, measure, (*sizes, seed), timeout_s=900)
            print(lines(summary(rows)), file=sys.stderr, flush=True)
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = {
        "benchmark": "rma", "environment": environment(), "ranks": options.ranks,
        "task": dict(zip(("data", "hidden", "batch", "steps"), sizes, strict=True)), "learning_rate": 0.1,
        "load_average_before": loads, "results": summary(rows), "raw": rows,
    }  # fmt: skip
    text = json.dumps(record, indent=1)
    if options.output is None:
        print(text)
    else:
        replace(options.output, text + "\n")
    return 0
