"""The 8-bit paper's claims for divided models: activations and their gradients cross in 8 bits.

    LACONIC_DATA=… python -m benchmarks eightbit-divided --mnist       # 3 seeds of five trainings, about 10 minutes
    LACONIC_DATA=… python -m benchmarks eightbit-divided --cifar
    LACONIC_DATA=… python -m benchmarks eightbit-divided --errors      # Table 1, "MNIST model parallel"; a minute
    LACONIC_DATA=… python -m benchmarks eightbit-divided --alexnet

--mnist: 784-1024-1024-10, all dense layers divided over the workers. The paper: F(4, 4) = 0.54, p = 0.71.

--cifar: cuda-convnet, convolutions data parallel (their gradients through the codec too), locally connected layers
divided by location. The paper: all test errors within 2 % of each other, relatively.

--errors: float32 trains for an epoch; then the outputs of the three layers, as they cross between workers, go through
each type. The paper: mean absolute and relative errors of each layer.

--alexnet: a reduced run: AlexNet's shapes on CIFAR-10 images of 224 × 224 pixels, convolutions data parallel, dense
layers divided by the trick; the training loss of float32 and `dynamic8`, step by step. The paper: top-5 errors of 18.55
and 18.65 % on ImageNet, which is not here.

Differs: real workers, where the paper simulated them; few epochs; the last test error counts, not the best. Partial
sums cross in 8 bits as well. Runs that are already in the output (same settings) are not repeated.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import laconic
from benchmarks.divide.layers import AlexNet, dense_plan
from benchmarks.papers import eightbit_paper as paper
from laconic.errors import LaconicError
from laconic.transports.launcher import run_local
from laconic.workloads import Changes, Task, Workload
from laconic.workloads.data import load
from laconic.workloads.optimizers import linear_decay, warmed_up

MNIST = "layers.2=dense(output); layers.5=dense(input); layers.8=dense(output)"
CIFAR = "0=data(codec={codec}, ask=true); 8=local; 10=local"
ERRORS = {  # Table 1, "MNIST model parallel": layers 1, 2, 3; absolute, and relative in percent
    "dynamic8": ((0.025, 2, 3321), (0.5, 2, 2)), "linear8": ((0.02, 2.6, 3387), (1, 2, 3)),
    "mantissa8": ((1, 70, 265000), (1.5, 2, 8)), "static8": ((0.45, 50, 187000), (1, 2, 6)),
}  # fmt: skip
SIZE = 224  # of AlexNet's images


@dataclass(frozen=True)
class Divided(paper.Settings):
    """What all runs of a table have in common; `{codec}` in the division is the type's."""

    network: str
    division: str

    def workload(self) -> Workload:
        changed = Changes(self.epochs, self.rate).of(self.network)
        return replace(changed, plan=warmed_up(0.1, linear_decay))

    def configuration(self, name: str) -> str:
        codec = "none" if name == paper.FP32 else name
        return f"divide:{codec}@{self.division.format(codec=codec)}"

    def test(self, task: Task, rank: int, world_size: int) -> dict[str, float]:
        if self.network == "cifar-convnet":
            return super().test(task, rank, world_size)
        return {"accuracy": task.evaluate(task.model)["accuracy"]}


# Table 1


def errors(settings: Divided, output: Path) -> str:
    """What each type makes of the inputs of the three layers after an epoch of float32."""
    record = run_local(1, _errors_rank, (settings,), timeout_s=1800)[0]
    paper.write(output, {"settings": asdict(settings), "layers": record})
    return errors_table(record)


def _errors_rank(settings: Divided) -> dict[str, list[dict[str, float]]]:
    task = settings.workload().prepare(0)
    optimizer = task.optimizer(task.model.parameters())
    for step in range(max(1, int(settings.fraction * task.steps_per_epoch()))):
        task.begin_step(optimizer, 0, step)
        optimizer.zero_grad()
        task.loss(task.model, task.batch(0, step)).backward()
        optimizer.step()
    seen: list[Tensor] = []
    for layer in task.model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _layer, given, made: seen.append(made.detach()))
    with torch.no_grad():
        task.model(task.batch(0, 0).x)
    return {name: [_error(name, values) for values in seen] for name in paper.TYPES}


def _error(name: str, values: Tensor) -> dict[str, float]:
    """Of a layer's outputs; relative to those that are not zero."""
    codec, flat = laconic.codec(name), values.reshape(-1)
    off = (codec.decode(codec.encode(flat), flat.numel()) - flat).abs()
    there = flat != 0
    relative = (off[there] / flat[there].abs()).mean()
    return {"absolute": float(off.mean()), "relative": float(relative), "mean": float(flat.abs().mean())}


def errors_table(found: dict[str, list[dict[str, float]]]) -> str:
    """Ours beside the paper's, as Markdown."""
    sizes = " / ".join(f"{each['mean']:.3g}" for each in next(iter(found.values())))
    lines = [f"Mean magnitude of the outputs of layers 1 / 2 / 3: {sizes}.", ""]
    lines += ["| type | mean absolute error | the paper's | relative, % | the paper's |", "|---|---|---|---|---|"]
    for name, layers in found.items():
        absolute, relative = ERRORS[name]
        ours = " / ".join(f"{each['absolute']:.2g}" for each in layers)
        percent = " / ".join(f"{100 * each['relative']:.1f}" for each in layers)
        theirs = " / ".join(map(str, absolute)), " / ".join(map(str, relative))
        lines.append(f"| `{name}` | {ours} | {theirs[0]} | {percent} | {theirs[1]} |")
    return "\n".join(lines)


# AlexNet


def alexnet(steps: int, images: int, output: Path) -> str:
    """Train float32 and dynamic8 from the same weights on the same images; losses step by step."""
    ways = ("none", "dynamic8")
    losses = {name: run_local(2, _alexnet_rank, (name, steps, images), timeout_s=3000)[0] for name in ways}
    content = {"steps": steps, "images_a_worker": images, "losses": losses}
    paper.write(output, content)
    return alexnet_table(content)


def _alexnet_rank(codec: str, steps: int, images: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with laconic.init(timeout_s=600) as world:
        torch.manual_seed(0)
        model = AlexNet().train()
        plan = f"features=data(codec={codec}); classifier=trick(shares); {dense_plan(model)}"
        model = laconic.divide(model, plan, codec=codec)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        data, found = load("cifar10", download=False).train, []
        for step in range(steps):
            rows = torch.arange(images) + images * (world.rank + world.world_size * step)
            x = functional.interpolate(data.x[rows].float() / 255 - 0.5, size=(SIZE, SIZE), mode="bilinear")
            torch.manual_seed(1000 * step + world.rank)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), data.y[rows].long())
            loss.backward()
            optimizer.step()
            total = loss.detach().reshape(1).clone()
            laconic.all_reduce(total)
            found.append(float(total) / world.world_size)
        sent = model.laconic_division.traffic.total_nbytes
    return {"losses": found, "sent_nbytes_per_step": sent / steps}


def alexnet_table(record: dict[str, Any]) -> str:
    """Means of the first and last four steps' losses, and bytes."""
    lines = [f"{record['steps']} steps of 2 × {record['images_a_worker']} images, one seed.", ""]
    lines += ["| codec | loss, first 4 steps | last 4 steps | MB sent a step and worker |", "|---|---|---|---|"]
    for name, run in record["losses"].items():
        first, last = (sum(part) / len(part) for part in (run["losses"][:4], run["losses"][-4:]))
        lines.append(f"| `{name}` | {first:.3f} | {last:.3f} | {run['sent_nbytes_per_step'] / 1e6:.1f} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    for name in ("mnist", "cifar", "errors", "alexnet"):
        which.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--types", default=",".join((paper.FP32, *paper.TYPES)))
    parser.add_argument("--epochs", type=int, help="default: 1 of MNIST, 2 of CIFAR-10")
    parser.add_argument("--rate", type=float, help="default: 0.003 of MNIST, 0.06 of CIFAR-10")
    parser.add_argument("--fraction", type=float, default=1.0, help="of all steps, to try it out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=16, help="for --alexnet")
    parser.add_argument("--images", type=int, default=16, help="for --alexnet: of a worker")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/8bit-divided-….json")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    part = next(name for name in ("mnist", "cifar", "errors", "alexnet") if getattr(options, name))
    output = options.output or paper.RESULTS / f"8bit-divided-{part}.json"
    name, plan, epochs, rate = ("cifar-convnet", CIFAR, 2, 0.06) if part == "cifar" else ("mnist-mlp", MNIST, 1, 0.003)
    settings = Divided(options.epochs or epochs, options.rate or rate, options.fraction, options.workers, name, plan)
    try:
        if part == "alexnet":
            print(alexnet(options.steps, options.images, output))
        elif part == "errors":
            print(errors(settings, output))
        else:
            seeds = [int(each) for each in options.seeds.split(",")]
            print(paper.trained(settings, options.types.split(","), seeds, output))
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
