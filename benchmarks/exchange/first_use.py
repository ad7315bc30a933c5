"""A short training with an empty kernel cache beside a warm one: is a step charged for what Numba compiles?

    python -m benchmarks first-use --output benchmarks/results/first-use.json       two ranks; about 4 minutes

`laconic train` and an own DDP script with one line of Laconic run with the same codec, each first with a new, empty
NUMBA_CACHE_DIR and then with what that run left there. The own script times `laconic.compress` and every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from laconic_lab.environment import environment
from laconic_lab.records.record import Record

SCRIPT = """
import json, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import laconic

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
ddp = DistributedDataParallel(nn.Sequential(*layers))
begun = time.perf_counter()
job = laconic.compress(ddp, sys.argv[1])
compress_s, steps = time.perf_counter() - begun, []
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(60):
    begun = time.perf_counter()
    optimizer.zero_grad()
    ddp(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    steps.append(time.perf_counter() - begun)
job.close()
if dist.get_rank() == 0:
    print(json.dumps({"compress_s": compress_s, "steps": steps}))
dist.destroy_process_group()
"""


def trained(codec: str, folder: Path) -> dict[str, Any]:
    """What `laconic train` records of its steps."""
    begun = time.perf_counter()
    words = ["train", "digits-mlp", "-n", "2", "--codec", codec, "--epochs", "3", "--runs", str(folder / "runs")]
    subprocess.run([sys.executable, "-m", "laconic", *words], check=True, capture_output=True, timeout=400)
    (trial,) = Record.load(folder / "runs" / "latest").trials
    return told(trial.step_seconds, command_s=time.perf_counter() - begun)


def own_script(codec: str, folder: Path) -> dict[str, Any]:
    """What a DDP script with one line of Laconic sees."""
    begun = time.perf_counter()
    script = folder / "own.py"
    script.write_text(SCRIPT)
    words = ["torch.distributed.run", "--nproc-per-node=2", str(script), codec]
    done = subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, text=True, timeout=400)
    seen = json.loads(done.stdout)
    return told(seen["steps"], compress_s=seen["compress_s"], command_s=time.perf_counter() - begun)


def told(steps: list[float], **seconds: float) -> dict[str, Any]:
    """The figures of one run, in seconds."""
    figures = {"first_step_s": steps[0], "longest_step_s": max(steps), "median_step_s": statistics.median(steps)}
    return {"steps": len(steps), "mean_step_s": statistics.fmean(steps), **figures, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=["dynamic8", "topk(0.01)+qsgd(4)"])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for codec in asked.codecs:
        for run in (trained, own_script):
            with tempfile.TemporaryDirectory() as name:
                os.environ["NUMBA_CACHE_DIR"] = str(Path(name) / "kernels")
                for cache in ("empty", "warm"):
                    rows.append({"codec": codec, "run": run.__name__, "cache": cache, **run(codec, Path(name))})
                    print(json.dumps(rows[-1]), flush=True)
    if asked.output:
        record = {"environment": environment(), "results": rows}
        asked.output.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
