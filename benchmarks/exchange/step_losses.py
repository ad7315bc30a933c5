"""Whether the losses that `laconic bench step` prints beside its times depend on the configuration, or on chance.

    python -m benchmarks step-losses --output benchmarks/results/step-losses.json      (about 10 minutes)

Every configuration trains the same batches from the same weights, over several seeds; the loss on training samples is
taken as the training goes on. Times mean nothing here, so it may run on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.storage import files
from laconic.transports.launcher import run_local
from laconic.transports.world import init
from laconic.workloads import Changes
from laconic_lab.bench.step import EVALUATED, Steps, StepSpec
from laconic_lab.environment import environment
from laconic_lab.runs.spec import configuration

Losses = list[tuple[float, float]]
CONFIGURATIONS = (
    "ddp", "distribute:none", "compress:dynamic8", "distribute:dynamic8", "distribute:dynamic8,overlap=false",
)  # fmt: skip


def run_rank(spec: StepSpec, name: str, every: int) -> Losses:
    """The losses after each `every` steps: on the samples of `laconic bench step`, and on sixteen times as many."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with init(timeout_s=600) as world:
            task = Changes(batch=spec.batch).of(spec.workload).prepare(spec.seed, scaling="weak")
            steps, losses = Steps(spec, configuration(name, spec.hosts), task, world), []
            for _ in range(spec.steps // every):
                steps.run(every)
                losses.append((steps.loss(EVALUATED), steps.loss(16 * EVALUATED)))
            steps.trainee.finish()
            steps.trainee.close()
            return losses
    finally:
        dist.destroy_process_group()


def table(record: dict[str, Any]) -> str:
    """How far losses jump within a training, beside how far configurations differ, for docs/research/overlap.md."""
    heads = "configuration | on 128 samples, steps 36 to 60, by seed | on 2048, mean of the last 30 steps | mean"
    lines, rows = [f"| {heads} |", "|---|---|---|---|"], dict[str, list[Losses]]()
    for each in record["trainings"]:
        rows.setdefault(each["config"], []).append(each["losses"])
    for config, seeds in rows.items():
        jumps = "; ".join(f"{min(few):.2f}–{max(few):.2f}" for few in ([a for a, _ in one[5:10]] for one in seeds))
        ends = [statistics.mean(many for _, many in one[-5:]) for one in seeds]
        shown = ", ".join(f"{end:.3f}" for end in ends)
        lines.append(f"| `{config}` | {jumps} | {shown} | {statistics.mean(ends):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="mnist-mlp")
    parser.add_argument("--configs", nargs="+", default=CONFIGURATIONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    kept = json.loads(asked.output.read_text())["trainings"] if asked.output and asked.output.exists() else []
    for seed in range(asked.seeds):
        for name in asked.configs:
            spec = StepSpec(asked.workload, [name], steps=asked.steps, seed=seed)
            losses = run_local(spec.hosts, run_rank, (spec, name, asked.every), timeout_s=3000)[0]
            one = {"workload": asked.workload, "config": name, "seed": seed, "every": asked.every, "losses": losses}
            kept = [each for each in kept if any(each[key] != one[key] for key in ("workload", "config", "seed"))]
            kept.append(one)
            print(f"{name:36} seed {seed}:", *(f"{few:.3f}" for few, _ in losses), flush=True)
            if asked.output:
                record = {"trainings": kept, "environment": environment()}
                files.replace(asked.output, json.dumps(record, indent=1) + "\n")
