"""Two emulated sites behind a slow link: bytes that cross, test accuracy and time of gaia beside synchronous training.

    LACONIC_DATA=FOLDER python -m benchmarks gaia --output FILE

Needs root (each site is a network namespace behind `tc tbf`). A site is one host with two workers, which reach each
other by its loopback; whatever its interface sends crosses the slow link, headers and acknowledgements included, as the
kernel counts it. All configurations begin with the same weights, see the same batches in the same order and take the
same number of steps; test accuracy is that of the model all workers hold after `finish()`. They run one after the
other in the same processes, their order rotating with the seed. Without LACONIC_DATA it trains on digits.

"sync, by sites" is sync with the hierarchical all-reduce: inside a host first, then across. It is what a user would
otherwise choose for two sites.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from laconic.errors import BadInput, LaconicError
from laconic.workloads.data import load
from laconic_lab.clusters.cluster import INTERFACE, Cluster, emulated
from laconic_lab.environment import environment

PER_SITE = 2
SYNC = "sync"
CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name → consistency, codec, options
    SYNC: ("sync", "none", {}),
    "sync, by sites": ("sync", "none", {"algorithm": "hierarchical", "hosts": (0, 0, 1, 1)}),
    "gaia(0.1)": ("gaia(0.1)", "none", {}),
    "gaia(0.2)": ("gaia(0.2)", "none", {}),
    "gaia(0.4)": ("gaia(0.4)", "none", {}),
    "gaia(0.2), dynamic8": ("gaia(0.2)", "dynamic8", {}),
}


@dataclass(frozen=True)
class Task:
    """What every rank does."""

    names: tuple[str, ...]
    data: str
    hidden: int
    batch: int
    steps: int
    learning_rate: float
    momentum: float
    seed: int


def network(task: Task, inputs: int) -> nn.Module:
    torch.manual_seed(task.seed)
    return nn.Sequential(nn.Linear(inputs, task.hidden), nn.ReLU(), nn.Linear(task.hidden, 10))


def flat_images(data: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images as rows, from 0 to 1, each with its labels."""
    found = load(data)
    scale = 16.0 if data == "digits" else 255.0
    train, test = (split.x.reshape(len(split), -1).float() / scale for split in (found.train, found.test))
    return train, found.train.y.long(), test, found.test.y.long()


def sent_nbytes() -> int:
    """What this host's interface has sent so far, as the kernel counts it."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise BadInput(f"there is no interface {INTERFACE}: this rank is not on an emulated host")


def train(name: str, task: Task, world: laconic.World, images: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """One configuration on this rank, from the same beginning."""
    x, y, test_x, test_y = images
    consistency, codec, options = CONFIGURATIONS[name]
    model = network(task, x.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), task.learning_rate, momentum=task.momentum)
    agreement = laconic.distribute(model, optimizer, consistency=consistency, codec=codec, **options)
    generator = torch.Generator().manual_seed(task.seed)
    laconic.barrier()
    begun, before = time.perf_counter(), sent_nbytes()
    for _ in range(task.steps):
        rows = torch.randint(len(x), (world.world_size, task.batch), generator=generator)[world.rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    agreement.finish()
    seconds = time.perf_counter() - begun
    laconic.barrier()
    crossed = sent_nbytes() - before
    with torch.no_grad():
        accuracy = 100 * float((model(test_x).argmax(1) == test_y).float().mean())
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    agreement.close()
    return {
        "seconds": seconds,
        "crossed_nbytes": crossed,  # of the host: the same on both of its ranks
        "accuracy": accuracy,
        "wait_s": sum(record.wait_s for record in agreement.records),
        "checksum": float(weights.double().sum()),
    }


def run_rank(task: Task) -> dict[str, Any]:
    with laconic.init(timeout_s=120) as world:
        images = flat_images(task.data)
        turn = task.seed % len(task.names)
        order = task.names[turn:] + task.names[:turn]
        return {name: train(name, task, world, images) for name in order}


def measure(task: Task, link: str, timeout_s: float) -> list[dict[str, Any]]:
    """The rows of one seed."""
    with Cluster(2, link) as cluster:
        ranks = cluster.run(run_rank, (task,), ranks_per_host=PER_SITE, timeout_s=timeout_s)
    rows = []
    for name in task.names:
        found = [rank[name] for rank in ranks]
        if len({each["checksum"] for each in found}) > 1:
            raise BadInput(f"{name}: the ranks do not hold the same model after finish()")
        rows.append({
            "configuration": name,
            "seed": task.seed,
            "crossed_nbytes": found[0]["crossed_nbytes"] + found[PER_SITE]["crossed_nbytes"],  # both ways
            "accuracy": found[0]["accuracy"],
            "seconds": max(each["seconds"] for each in found),
            "wait_s": [each["wait_s"] for each in found],
        })  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """One row a configuration, over all seeds, beside sync of the same seeds."""
    names = list(dict.fromkeys(row["configuration"] for row in rows))
    chosen = {name: [row for row in rows if row["configuration"] == name] for name in names}
    base = {row["seed"]: row for row in chosen[SYNC]}
    table = []
    for name, each in chosen.items():
        factors = [base[row["seed"]]["crossed_nbytes"] / row["crossed_nbytes"] for row in each]
        differences = [row["accuracy"] - base[row["seed"]]["accuracy"] for row in each]
        table.append({
            "configuration": name,
            "seeds": len(each),
            "crossed_nbytes_per_step": statistics.median(row["crossed_nbytes"] / steps for row in each),
            "reduction_factor": statistics.median(factors),
            "reduction_factor_least": min(factors),
            "accuracy": statistics.median(row["accuracy"] for row in each),
            "accuracy_difference_worst": min(differences),
            "seconds": statistics.median(row["seconds"] for row in each),
        })  # fmt: skip
    return table


def lines(table: list[dict[str, Any]]) -> str:
    heads = ("kB a step", "fewer ×", "least ×", "accuracy", "worst Δ", "seconds")
    text = [f"{'configuration':22}" + "".join(f"{head:>10}" for head in heads)]
    for row in table:
        figures = (
            f"{row['crossed_nbytes_per_step'] / 1e3:.1f}", f"{row['reduction_factor']:.1f}",
            f"{row['reduction_factor_least']:.1f}", f"{row['accuracy']:.2f}",
            f"{row['accuracy_difference_worst']:+.2f}", f"{row['seconds']:.1f}",
        )  # fmt: skip
        text += [f"{row['configuration']:22}" + "".join(f"{figure:>10}" for figure in figures)]
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="10mbit", help="the rate between the sites")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="per worker")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="configurations, separated by ';'; sync is always among them")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds, per seed")
    parser.add_argument("--output", type=Path, help="the record as JSON; to stdout without it")
    options = parser.parse_args()
    asked = [name.strip() for name in options.only.split(";") if name.strip()]
    names = tuple(name for name in CONFIGURATIONS if not asked or name in asked or name == SYNC)
    data = "mnist" if os.environ.get("LACONIC_DATA") else "digits"
    sizes = options.hidden, options.batch, options.steps
    rows: list[dict[str, Any]] = []
    loads = []
    try:
        for seed in range(options.seeds):
            loads.append(os.getloadavg()[0])
            task = Task(names, data, *sizes, options.learning_rate, options.momentum, seed)
            rows += measure(task, options.link, options.timeout)
            print(lines(summary(rows, options.steps)), file=sys.stderr, flush=True)
            text = json.dumps(record(task, options.link, rows, loads), indent=1)
            if options.output is not None:
                options.output.write_text(text + "\n")  # what is measured is kept if a later seed fails
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output is None:
        print(text)
    return 0


def record(task: Task, link: str, rows: list[dict[str, Any]], loads: list[float]) -> dict[str, Any]:
    """All that was measured, and how."""
    return {
        "benchmark": "gaia",
        "environment": environment(),
        "link": link,
        "rate_bps": emulated(link).rate_bps,
        "sites": 2,
        "workers_per_site": PER_SITE,
        "task": {**asdict(task), "seed": "as in each row"},
        "configurations": {name: CONFIGURATIONS[name] for name in task.names},
        "load_average_before": loads,
        "results": summary(rows, task.steps),
        "raw": rows,
    }
