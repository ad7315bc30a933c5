"""Where a step's processor time goes, by thread: for the rows of `exchange`, one at a time.

    python -m benchmarks profile-exchange --link 1gbit "no communication" ddp dynamic8 "distribute:topk(0.01)+qsgd(4)"

Needs root for the emulated hosts. Prints, for rank 0 and per step, the time of the step and the processor time of each
thread as the kernel counts it: the main thread computes, `gloo_tcp_loop` moves bytes, another `python` thread encodes.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.exchange.exchange import Task, Trainee, load_data
from laconic_lab.clusters.cluster import Cluster


def thread_seconds() -> dict[tuple[str, str], float]:
    """Processor seconds of each thread of this process, by its number and name."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        name = (folder / "comm").read_text().strip()
        found[folder.name, name] = int((folder / "schedstat").read_text().split()[0]) / 1e9
    return found


def run_rank(name: str, steps: int) -> str:
    dist.init_process_group("gloo")
    try:
        images, labels, _ = load_data(1)
        shard = slice(dist.get_rank(), None, dist.get_world_size())
        trainee = Trainee(name, Task((name,), 64, 1, steps, 14, 0.1, 1), images[shard], labels[shard])
        trainee.block(14)
        before, begun = thread_seconds(), time.perf_counter()
        trainee.block(steps)
        wall_s = (time.perf_counter() - begun) / steps
        spent = {key: (s - before.get(key, 0.0)) / steps for key, s in thread_seconds().items()}
        lines = [f"{name}: {1e3 * wall_s:.1f} ms a step, {1e3 * sum(spent.values()):.1f} ms of processor time"]
        for (_, thread), seconds in sorted(spent.items(), key=lambda item: -item[1]):
            if seconds > 1e-4:
                lines.append(f"    {thread:20} {1e3 * seconds:6.1f} ms")
        return "\n".join(lines)
    finally:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="+")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in options.configurations:
        with Cluster(options.hosts, options.link) as cluster:
            print(cluster.run(run_rank, (name, options.steps), timeout_s=200)[0], flush=True)
    return 0
