"""Training parity: the 8-bit paper's MNIST network through every codec, beside float32, after the same epochs.

    LACONIC_DATA=… python -m benchmarks parity                     # all codecs, 3 seeds, about 20 minutes
    LACONIC_DATA=… python -m benchmarks parity --epochs 1 --seeds 0 --codecs fp32,dynamic8

784-1024-1024-10 with dropout (0.2, 0.3, 0.3). SGD with momentum 0.9 from a rate of 0.1, or (--optimizer rmsprop) the
paper's RMSProp from 0.003; both fall linearly to zero, so that the accuracy is not that of the last noisy step. Four
DDP workers on loopback, 128 images each at a step; for one seed all codecs begin with the same weights, and see the
same images in the same order under the same dropout masks. Codecs run as `laconic.compress(ddp, codec)` does by
default: biases and small tensors exact, feedback where the codec needs it.

With RMSProp top-k lost 3.8 points after one epoch, with SGD 0.1 after two. Likely because RMSProp divides by a running
mean of squares, so that a value which top-k sends once in a hundred steps, with all that was owed, moves its weight no
further than one that is sent at every step. Top-k is therefore judged with SGD, as in the papers on it.

Each run is added to the output file as it ends, and runs that are already there (same settings) are not repeated.
Bytes are what rank 0's transport counted; fp32's are those of a ring, 2(P−1)/P · 4 bytes a parameter.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.transports.launcher import run_local
from laconic.workloads.data import fetch, load
from laconic.workloads.models.small import mlp
from laconic_lab.environment import environment

FP32 = "fp32"
CODECS = [
    FP32, "dynamic8", "static8", "linear8", "mantissa8", "onebit", "qsgd(4)", "ternary", "topk(0.01)+qsgd(4)",
]  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.003, alpha=0.9),
}
OUTPUT = Path(__file__).parents[1] / "results" / "parity-mnist.json"
TOLERANCE_POINTS = 0.3


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common."""

    epochs: int = 5
    batch: int = 128  # a worker
    workers: int = 4
    optimizer: str = "sgd"


def train(codec: str, seed: int, settings: Settings) -> dict[str, Any]:
    """One rank of one run; rank 0's answer counts."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = load("mnist", download=False)
    torch.manual_seed(seed)
    model = mlp()
    ddp = DistributedDataParallel(model)
    state = None if codec == FP32 else laconic.compress(ddp, codec)
    optimizer = OPTIMIZERS[settings.optimizer](ddp.parameters())
    steps_a_epoch = len(data.train) // (settings.batch * size)
    steps = settings.epochs * steps_a_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    torch.manual_seed(1000 * (seed + 1) + rank)  # dropout: other masks on every rank, the same for every codec
    begun, losses = time.perf_counter(), []
    for epoch in range(settings.epochs):
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(100 * seed + epoch))
        for step in range(steps_a_epoch):
            rows = order[(step * size + rank) * settings.batch :][: settings.batch]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(pixels(data.train.x[rows])), data.train.y[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - begun
    numel = sum(p.numel() for p in model.parameters())
    sent = 2 * (size - 1) / size * 4 * numel * steps
    if state is not None:
        sent = state.world.transport.counters.total_sent_nbytes
        state.close()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(float(torch.equal(first, weights)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    accuracy = evaluate(model, data.test.x, data.test.y)
    dist.destroy_process_group()
    return {
        "accuracy": accuracy, "losses": losses, "steps": steps, "sent_nbytes_per_step": sent / steps,
        "seconds": seconds, "replicas_identical": bool(same.item()),
    }  # fmt: skip


def pixels(images: Tensor) -> Tensor:
    return images.reshape(len(images), -1).float() / 255


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Test accuracy, in percent."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(pixels(x)).argmax(1) == y).sum())
            for x, y in zip(images.split(1000), labels.split(1000), strict=True)
        )
    return 100 * right / len(labels)


def table(runs: list[dict[str, Any]], codecs: list[str]) -> str:
    """The runs as Markdown: mean test accuracy, each seed's, the difference to float32 in points, MB sent per step."""
    by_codec = {codec: {run["seed"]: run for run in runs if run["codec"] == codec} for codec in codecs}
    lines = [
        "| codec | test accuracy, mean | by seed | against fp32 on the same seeds | MB sent a step and rank |",
        "|---|---|---|---|---|",
    ]
    for codec, by_seed in by_codec.items():
        if not by_seed:
            continue
        accuracies = {seed: run["accuracy"] for seed, run in sorted(by_seed.items())}
        mean = sum(accuracies.values()) / len(accuracies)
        baseline = by_codec.get(FP32, {})
        pairs = [accuracy - baseline[seed]["accuracy"] for seed, accuracy in accuracies.items() if seed in baseline]
        against = "–" if codec == FP32 or not pairs else f"{sum(pairs) / len(pairs):+.2f}"
        if against != "–" and abs(sum(pairs) / len(pairs)) > TOLERANCE_POINTS:
            against += f" (beyond {TOLERANCE_POINTS})"
        each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies.values())
        sent = sum(run["sent_nbytes_per_step"] for run in by_seed.values()) / len(by_seed) / 1e6
        lines.append(f"| `{codec}` | {mean:.2f} % | {each} | {against} | {sent:.3f} |")
    return "\n".join(lines)


def read(path: Path, settings: Settings) -> list[dict[str, Any]]:
    """The runs that were made with these settings."""
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    return stored["runs"] if stored["settings"] == asdict(settings) else []


def write(path: Path, settings: Settings, runs: list[dict[str, Any]]) -> None:
    content = {"settings": asdict(settings), "environment": environment(), "runs": runs}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def arguments() -> argparse.Namespace:
    defaults, parser = Settings(), argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--batch", type=int, default=defaults.batch, help="images a worker and step")
    parser.add_argument("--workers", type=int, default=defaults.workers)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default=defaults.optimizer)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--codecs", help="separated by commas (default: fp32 and the eight of the table)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    codecs = CODECS
    if options.codecs is not None:
        codecs = [codec.strip() for codec in re.split(r",(?![^(]*\))", options.codecs)]  # not inside parentheses
    for codec in codecs:
        if codec != FP32:
            laconic.codec(codec)  # a wrong name fails now
    settings = Settings(options.epochs, options.batch, options.workers, options.optimizer)
    fetch("mnist")
    runs = read(options.output, settings)
    for seed in map(int, options.seeds.split(",")):
        for codec in codecs:
            if any((run["codec"], run["seed"]) == (codec, seed) for run in runs):
                continue
            begun = time.perf_counter()
            result = run_local(settings.workers, train, (codec, seed, settings), timeout_s=1800)[0]
            result["seconds_with_start"] = time.perf_counter() - begun
            runs.append({"codec": codec, "seed": seed, **result})
            write(options.output, settings, runs)
            note = "" if result["replicas_identical"] else ", REPLICAS DIFFER"
            line = f"{codec}, seed {seed}: {result['accuracy']:.2f} % in {result['seconds']:.0f} s{note}"
            print(line, file=sys.stderr, flush=True)
    print(table(runs, codecs))
