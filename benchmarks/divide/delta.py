"""Whether the change against a sample's last activation (AQ-SGD) trains better than the activation, at equal bytes.

    python -m benchmarks delta            # about three minutes on one core

The digits' 64-256-256-10 network in two stages on two threads, 20 epochs of SGD with momentum from a rate of 0.1 that
falls to zero. Activations cross through coarse codecs, plain and as changes (`Stages(delta=True)`), gradients through
dynamic8. The test loss is that of the exact model, so that it tells what training lost. Runs that are already in the
output are not repeated.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.papers import eightbit_paper as paper
from laconic.parallel import Boundary, Stages
from laconic.parallel.pipeline import build
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from laconic.workloads import get
from laconic.workloads.order import EpochOrder

OUTPUT = Path(__file__).parents[1] / "results" / "delta.json"
CODECS = ("none", "qsgd(4)", "qsgd(2)", "onebit", "topk(0.1)")
SEEDS, EPOCHS, BATCH, RATE = (0, 1, 2), 20, 64, 0.1


def train(codec: str, delta: bool, seed: int) -> dict[str, Any]:
    """One training; what the last stage knows."""
    task = get("digits-mlp").prepare(seed)
    samples = len(task.data.train)
    per_epoch = EpochOrder(samples, BATCH, seed, 0).steps

    def work(transport: Any) -> dict[str, Any] | None:
        plan = Stages(("layers.3",), 4, delta=delta, uneven=True)
        stage = build(copy.deepcopy(task.model), plan, Boundary.of((codec, "dynamic8")), World(transport))
        optimizer = torch.optim.SGD(stage.parameters(), RATE, momentum=0.9)
        for epoch in range(EPOCHS):
            order = EpochOrder(samples, BATCH, seed, epoch)
            for step in range(order.steps):
                numbers = order.indices(step)
                batch = task.batch_of(epoch, numbers)
                for group in optimizer.param_groups:
                    group["lr"] = RATE * (1 - (epoch * per_epoch + step) / (EPOCHS * per_epoch))
                optimizer.zero_grad()
                stage.step(batch.x, batch.y, functional.cross_entropy, samples=numbers if delta else None)
                optimizer.step()
        memory, sent, whole = stage.memory_nbytes, stage.traffic.total_nbytes, stage.whole_state_dict()
        return None if whole is None else {"state": whole, "memory_nbytes": memory, "sent_nbytes": sent}

    found = run_threads(2, work, timeout_s=600)[0]
    task.model.load_state_dict(found.pop("state"))
    tested = task.evaluate(task.model)
    if not math.isfinite(tested["loss"]):
        tested["loss"] = None  # JSON has no NaN
    return {"codec": codec, "delta": delta, "seed": seed, **tested, **found}


def table(runs: list[dict[str, Any]]) -> str:
    """Means over the seeds, as Markdown."""
    lines = ["| activations by | test loss, mean | by seed | test accuracy, mean | sent by stage 0 | memory |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for codec, delta in dict.fromkeys((run["codec"], run["delta"]) for run in runs):
        mine = [run for run in runs if (run["codec"], run["delta"]) == (codec, delta)]
        losses, accuracy = [run["loss"] for run in mine], statistics.mean(run["accuracy"] for run in mine)
        each = ", ".join("diverged" if loss is None else f"{loss:.4f}" for loss in losses)
        mean = "–" if None in losses else f"{statistics.mean(losses):.4f}"
        name = f"delta({codec})" if delta else codec
        sizes = f"{mine[0]['sent_nbytes'] / 1e6:.2f} MB | {mine[0]['memory_nbytes'] / 1e6:.2f} MB"
        lines.append(f"| `{name}` | {mean} | {each} | {100 * accuracy:.2f} % | {sizes} |")
    return "\n".join(lines)


def main() -> int:
    torch.set_num_threads(1)
    stored: list[dict[str, Any]] = json.loads(OUTPUT.read_text())["runs"] if OUTPUT.exists() else []
    known = {(run["codec"], run["delta"], run["seed"]): run for run in stored}
    runs = []
    for chosen in product(CODECS, (False, True), SEEDS):
        if chosen[:2] != ("none", True):
            runs.append(known[chosen] if chosen in known else train(*chosen))
            paper.write(OUTPUT, {"runs": runs})
    print(table(runs))
    return 0
