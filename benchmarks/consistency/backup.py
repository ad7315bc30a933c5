"""What a stopped worker costs the others under `sync(drop_slowest=1)` and under `sync`: steps a second.

    python -m benchmarks backup --output benchmarks/results/backup.json

Four workers train a small model; computing is a pause of fixed length, so that four of them fit on two cores. After
some healthy steps one worker is stopped by SIGSTOP for a few seconds, then continued; at the end all must hold the same
weights. `sync` is measured with the same stop, on the same machine, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import laconic
from laconic.transports.launcher import LocalJob

PAUSE_S = 0.02
HEALTHY_S, STOPPED_S = 3.0, 2.0


def train(folder: str, spec: str, steps: int) -> tuple[list[float], float]:
    """One worker: when each of its steps was done, and a sum over its weights."""
    with laconic.init("zmq", timeout_s=60) as world:
        torch.manual_seed(0)
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        job = laconic.distribute(model, optimizer, consistency=spec, world=world)
        x = torch.randn(16, 100, generator=torch.Generator().manual_seed(world.rank))
        done = []
        for step in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            time.sleep(PAUSE_S)
            optimizer.step()
            done.append(time.monotonic())
            if step == 5:
                Path(folder, f"pid{world.rank}").write_text(str(os.getpid()))
        job.finish()
        total = sum(float(p.detach().double().sum()) for p in model.parameters())
        job.close()
        return done, total


def measure(spec: str, workers: int = 4, victim: int = 3) -> dict[str, Any]:
    """Steps a second of rank 0, healthy and while `victim` is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        steps = int((HEALTHY_S + STOPPED_S + 1) / PAUSE_S)
        job = LocalJob(workers, train, (folder, spec, steps))
        try:
            while not all(Path(folder, f"pid{rank}").exists() for rank in range(workers)):
                time.sleep(0.01)
            process = int(Path(folder, f"pid{victim}").read_text())
            begun = time.monotonic()
            time.sleep(HEALTHY_S)
            os.kill(process, signal.SIGSTOP)
            stopped = time.monotonic()
            time.sleep(STOPPED_S)
            os.kill(process, signal.SIGCONT)
            continued = time.monotonic()
            outcomes = job.outcomes(120)
        finally:
            job.kill()
    errors = [outcome.error for outcome in outcomes if outcome.error or outcome.value is None]
    if errors:
        raise RuntimeError(f"{spec}: {errors[0]}")
    times = outcomes[0].value[0]
    rates = {
        "healthy_steps_per_s": _rate(times, begun, stopped),
        "stopped_steps_per_s": _rate(times, stopped, continued),
    }
    same = len({outcome.value[1] for outcome in outcomes}) == 1
    lost = 1 - rates["stopped_steps_per_s"] / rates["healthy_steps_per_s"]
    return {"consistency": spec, **rates, "throughput_lost": lost, "same_weights": same}


def _rate(times: list[float], begin: float, end: float) -> float:
    """Steps a second between two moments: the inverse of the mean step, the last one cut off included."""
    return sum(1 for when in times if begin < when <= end) / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for _ in range(options.repeats):
        for spec in ("sync(drop_slowest=1)", "sync"):
            rows.append(measure(spec))
            print(json.dumps(rows[-1]), flush=True)
    lost = statistics.median(row["throughput_lost"] for row in rows if row["consistency"] != "sync")
    print(f"sync(drop_slowest=1) loses {lost:.1%} of its healthy throughput while a worker is stopped")
    if options.output is not None:
        from laconic_lab.environment import environment

        whole = {"environment": environment(), "pause_s": PAUSE_S, "rows": rows, "median_throughput_lost": lost}
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit(0 if lost <= 0.1 and all(row["same_weights"] for row in rows) else 1)
