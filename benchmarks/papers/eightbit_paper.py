"""The claims of Dettmers, 8-Bit Approximations for Parallelism in Deep Learning (ICLR 2016), as benchmarks.

    python -m benchmarks eightbit-paper --mnist                       # reads what `parity` left; seconds
    LACONIC_DATA=… python -m benchmarks eightbit-paper --cifar        # per seed five trainings of about 5 minutes
    python -m benchmarks eightbit-paper --transfer                    # needs root; about a minute

--mnist: test errors of float32 and the four 8-bit types over the seeds of benchmarks/results/parity-mnist.json, and
the F tests whether they differ. The paper: F(4, 4) = 0.71, p = 0.59, no significant difference. Differs: data
parallelism on four real workers, where the paper simulated them on one; SGD with momentum where the file says so; the
last test error counts, not the best.

--cifar: cuda-convnet with two locally connected layers. The paper: all test errors within 2 % of each other,
relatively. Differs: gradients of all layers go through the codec (the paper divides the local layers by model
parallelism), few epochs with a rate that falls to zero by their end, and the means of several seeds where the paper has
one training of each type. As cuda-convnet does, an image is tested in ten views: its corners and its middle, each also
mirrored. Each run is added to the output file as it ends, and runs that are already there (same settings) are not
repeated.

--transfer: encode, send to another host over a link of 1 Gbit/s, decode. The paper, between GPUs over PCIe at about 8
GB/s: 8-bit always quicker than 32-bit and twice as quick above 250,000 values; 1-bit 10 to 20 % quicker than 8-bit
above 300,000. Differs: the link is slower and the processor encodes. 1-bit runs with its error feedback, 8-bit
without, as in the paper. The clock is the machine's own, which both emulated hosts share: from the first's beginning
to the second's end.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from benchmarks.papers.variance import Variance, blocked_variance, one_way_variance
from laconic.errors import BadInput, LaconicError
from laconic.statistics import median, ratio_interval
from laconic.storage import files
from laconic.transports.launcher import run_local
from laconic.workloads import Changes, Task, Workload
from laconic.workloads.data import fetch
from laconic.workloads.optimizers import linear_decay, warmed_up
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.environment import environment
from laconic_lab.runs.spec import configuration
from laconic_lab.runs.strategies import make_trainee

FP32, TYPES = "fp32", ("dynamic8", "static8", "linear8", "mantissa8")
RESULTS = Path(__file__).parents[1] / "results"
RELATIVE = 0.02  # how far apart the paper's CIFAR-10 errors were, at most
NUMELS = (1_000, 10_000, 50_000, 100_000, 250_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
MIDDLE, MIRRORED = (0.5, 0.5), (0.0, 1.0)  # as the inputs' random numbers: row, column, and mirrored from a half on
CORNERS = [(row, column) for row in (0.0, 1.0) for column in (0.0, 1.0)]
VIEWS = [(*place, mirror) for place in (MIDDLE, *CORNERS) for mirror in MIRRORED]
SENT = (FP32, "dynamic8", "linear8", "onebit")


# MNIST


def mnist(path: Path) -> str:
    """The errors by type, and whether they differ, as Markdown."""
    if not path.exists():
        raise BadInput(f"there is no {path}: make it with: python -m benchmarks parity")
    stored = json.loads(path.read_text())
    errors = {name: {run["seed"]: 100 - run["accuracy"] for run in stored["runs"] if run["codec"] == name}
              for name in (FP32, *TYPES)}  # fmt: skip
    seeds = common_seeds(errors)
    if len(seeds) < 2:
        raise BadInput(f"{path} has {len(seeds)} seeds of all of {', '.join(errors)}; two are needed")
    settings = ", ".join(f"{key} {value}" for key, value in stored["settings"].items())
    lines = [f"{settings}; seeds {', '.join(map(str, seeds))}", ""]
    lines += ["| type | test error, mean | by seed |", "|---|---|---|"]
    for name, by_seed in errors.items():
        lines.append(f"| `{name}` | {_mean_and_each([by_seed[seed] for seed in seeds])} |")
    return "\n".join([*lines, "", *differences(errors, seeds)])


def common_seeds(errors: dict[str, dict[int, float]]) -> list[int]:
    """The seeds that every type was trained with."""
    return sorted(set.intersection(*(set(by_seed) for by_seed in errors.values())))


def differences(errors: dict[str, dict[int, float]], seeds: list[int]) -> list[str]:
    """Whether the types differ: two sentences."""
    groups = [[by_seed[seed] for seed in seeds] for by_seed in errors.values()]
    return [
        _sentence("one-way", one_way_variance(groups), "Kruskal and Wallis") + "\n",
        _sentence("by seeds", blocked_variance(groups), "Friedman"),
    ]


def _mean_and_each(errors: list[float]) -> str:
    return f"{statistics.mean(errors):.2f} % | {', '.join(f'{error:.2f}' for error in errors)}"


def _sentence(kind: str, found: Variance, ranks: str) -> str:
    differs = "the types differ" if found.p_value < 0.05 else "no significant difference"
    return (
        f"{kind}: F({found.between}, {found.within}) = {found.f:.2f}, p = {found.p_value:.2f}: {differs} "
        f"({ranks} p = {found.rank_p:.2f}, normality of the residuals p = {found.normality_p:.2f})"
    )


# CIFAR-10


@dataclass(frozen=True)
class Settings:
    """What all runs of the table have in common; `fraction` of the steps is for trying the benchmark out."""

    epochs: int
    rate: float
    fraction: float
    workers: int

    def workload(self) -> Workload:
        """The laboratory's, with a rate that rises over a tenth of the training and falls to zero."""
        changed = Changes(self.epochs, self.rate).of("cifar-convnet")
        return replace(changed, plan=warmed_up(0.1, linear_decay))

    def configuration(self, name: str) -> str:
        """How a type trains, by the laboratory's name."""
        return "ddp" if name == FP32 else f"distribute:{name}"

    def test(self, task: Task, rank: int, world_size: int) -> dict[str, float]:
        """What is known of the trained model."""
        return test(task, rank, world_size)


def train(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """One rank of one training; rank 0's answer counts."""
    dist.init_process_group("gloo")
    try:
        with laconic.init(timeout_s=600) as world:
            task = settings.workload().prepare(seed)
            optimizer = task.optimizer(task.model.parameters())
            chosen = configuration(settings.configuration(name), world.world_size)
            trainee = make_trainee(chosen, task.model, optimizer, world)
            place, epoch_steps = (world.rank, world.world_size), task.steps_per_epoch(world.world_size)
            steps = max(1, int(settings.fraction * settings.epochs * epoch_steps))
            begun = time.perf_counter()
            for number in range(steps):
                when = divmod(number, epoch_steps)
                task.begin_step(trainee.optimizer, *when, *place)
                trainee.optimizer.zero_grad()
                trainee.train_on(task, task.batch(*when, *place))
                trainee.optimizer.step()
            seconds = time.perf_counter() - begun
            trainee.finish()
            same = _same(task.model)
            trainee.close()
            return {**settings.test(task, *place), "steps": steps, "seconds": seconds, "replicas_identical": same}
    finally:
        dist.destroy_process_group()


def test(task: Task, rank: int, world_size: int) -> dict[str, float]:
    """The share of test images that are told right: by the mean of ten views, and by the middle alone."""
    images, labels = task.data.test.x[rank::world_size], task.data.test.y[rank::world_size]
    task.model.eval()
    right = torch.zeros(3)
    with torch.no_grad():
        for x, y in zip(images.split(250), labels.split(250), strict=True):
            views = [task.workload.inputs(x, torch.tensor(view).expand(len(x), 3)) for view in VIEWS]
            told = torch.stack([task.model(view).softmax(1) for view in views])
            hits = [(seen.argmax(1) == y).sum() for seen in (told.mean(0), told[0])]
            right += torch.tensor([*hits, len(x)], dtype=torch.float32)
    dist.all_reduce(right)
    return {"accuracy": float(right[0] / right[2]), "accuracy_of_one_view": float(right[1] / right[2])}


def _same(model: torch.nn.Module) -> bool:
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(float(torch.equal(first, mine)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same.item())


def trained(settings: Settings, names: list[str], seeds: list[int], output: Path) -> str:
    """Train what is not in the output yet; the table."""
    for name in names:
        configuration(settings.configuration(name), settings.workers)  # a wrong name fails now
    fetch(settings.workload().dataset)
    runs = _stored(output, settings)
    for seed, name in product(seeds, names):
        if any((run["codec"], run["seed"]) == (name, seed) for run in runs):
            continue
        begun = time.perf_counter()
        result = run_local(settings.workers, train, (name, seed, settings), timeout_s=7200)[0]
        made = {"codec": name, "seed": seed, "commit": environment()["commit"]}
        runs.append({**made, **result, "seconds_with_start": time.perf_counter() - begun})
        write(output, {"settings": asdict(settings), "runs": runs})
        text = f"{100 * result['accuracy']:.2f} % after {result['steps']} steps in {result['seconds']:.0f} s"
        print(f"{name}, seed {seed}: {text}", file=sys.stderr, flush=True)
    return cifar_table(settings, [run for run in runs if run["codec"] in names and run["seed"] in seeds])


def _stored(path: Path, settings: Settings) -> list[dict[str, Any]]:
    """The runs that were made with these settings."""
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    if stored["settings"] != asdict(settings):
        raise BadInput(f"{path} holds runs with other settings ({stored['settings']}); give another --output")
    return list(stored["runs"])


def cifar_table(settings: Settings, runs: list[dict[str, Any]]) -> str:
    """Test errors of the seeds that all types were trained with, and how far their means are apart, relatively."""
    names = list(dict.fromkeys(run["codec"] for run in runs))
    errors = {name: {run["seed"]: 100 - 100 * run["accuracy"] for run in runs if run["codec"] == name}
              for name in names}  # fmt: skip
    seeds = common_seeds(errors)
    if not seeds:
        raise BadInput(f"there is no seed yet that all of {', '.join(names)} were trained with")
    means = {name: statistics.mean(by_seed[seed] for seed in seeds) for name, by_seed in errors.items()}
    lines = [
        f"{settings.epochs} epochs, learning rate {settings.rate:g}, {settings.workers} workers, "
        f"seeds {', '.join(map(str, seeds))}",
        "",
        "| type | test error, mean | by seed | mean, relative to fp32 | seconds, least |",
        "|---|---|---|---|---|",
    ]
    for name, by_seed in errors.items():
        against = f"{100 * (means[name] / means[FP32] - 1):+.1f} %" if FP32 in means and name != FP32 else "–"
        seconds = min(run["seconds"] for run in runs if run["codec"] == name)
        lines.append(f"| `{name}` | {_mean_and_each([by_seed[seed] for seed in seeds])} | {against} | {seconds:.0f} |")
    lines += ["", _apart(means)]
    if len(seeds) > 1:
        lines += ["", *differences(errors, seeds)]
    return "\n".join(lines)


def _apart(means: dict[str, float]) -> str:
    apart = max(means.values()) / min(means.values()) - 1
    verdict = "within" if apart <= RELATIVE else "beyond"
    text = f"largest over smallest mean: {100 * apart:.2f} % apart, {verdict} the paper's {100 * RELATIVE:g} %"
    if FP32 not in means:
        return text
    farthest = max(abs(mean / means[FP32] - 1) for mean in means.values())
    return f"{text}; farthest from fp32: {100 * farthest:.2f} %"


# Transfer


def transfer_rank(numels: list[int], seconds_per_size: float) -> list[dict[str, Any]]:
    """Rank 0 sends, rank 1 receives; each returns when it began or ended, by size, repeat and codec."""
    dist.init_process_group("gloo")
    try:
        return [_transfer_size(numel, seconds_per_size) for numel in numels]
    finally:
        dist.destroy_process_group()


def _transfer_size(numel: int, budget_s: float) -> dict[str, Any]:
    lanes = {name: lane(name, numel) for name in SENT}
    for once in lanes.values():  # kernels are compiled, buffers touched; the second time is the guess
        once()
    begun = time.perf_counter()
    for once in lanes.values():
        once()
    guess = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(guess, dist.ReduceOp.MAX)
    repeats = int(min(100, max(10, budget_s / float(guess))))
    stamps: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(repeats):  # all take turns: a slow moment of the machine falls on all
        for name, once in lanes.items():
            stamps[name].append(once())
    return {"numel": numel, "stamps": stamps}


def lane(name: str, numel: int) -> Callable[[], float]:
    """One transfer: returns when it began on rank 0, when it ended on rank 1."""
    sender = dist.get_rank() == 0
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    if name == FP32:
        incoming = torch.empty(numel)

        def plain() -> float:
            dist.barrier()
            begun = time.perf_counter()
            if sender:
                dist.send(values, 1)
                return begun
            dist.recv(incoming, 0)
            return time.perf_counter()

        return plain
    codec = laconic.codec(name)
    payload = torch.empty(codec.max_nbytes(numel), dtype=torch.uint8)
    residual = torch.zeros(numel)
    feedback = name == "onebit"

    def encoded() -> Tensor:
        return codec.encode_feedback(values, residual, out=payload) if feedback else codec.encode(values, out=payload)

    def coded() -> float:
        dist.barrier()
        begun = time.perf_counter()
        if sender:
            dist.send(encoded(), 1)
            return begun
        dist.recv(payload, 0)
        codec.decode(payload, numel)
        return time.perf_counter()

    return coded


def transfer(link: str, numels: list[int], seconds_per_size: float, output: Path) -> str:
    """Measure on two emulated hosts; the table."""
    load = os.getloadavg()[0]
    with Cluster(2, link) as cluster:
        sender, receiver = cluster.run(transfer_rank, (numels, seconds_per_size), timeout_s=900)
    rows = []
    for begun, ended in zip(sender, receiver, strict=True):
        seconds = {name: [b - a for a, b in zip(begun["stamps"][name], ended["stamps"][name], strict=True)]
                   for name in SENT}  # fmt: skip
        rows.append({"numel": begun["numel"], "results": [_transfer_row(name, seconds) for name in SENT]})
    write(output, {"benchmark": "8bit-transfer", "link": link, "load_average_before": load, "sizes": rows})
    return transfer_table(link, rows)


def _transfer_row(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    centre = median(seconds[name])
    return {
        "codec": name,
        "seconds": centre.value,
        "seconds_interval": centre.interval,
        "speed_up_over_fp32": statistics.median(seconds[FP32]) / centre.value,
        "speed_up_over_fp32_interval": ratio_interval(seconds[name], seconds[FP32], paired=True),
        "speed_up_over_dynamic8": statistics.median(seconds["dynamic8"]) / centre.value,
        "repeats": centre.count,
        "raw_seconds": seconds[name],
    }


def transfer_table(link: str, rows: list[dict[str, Any]]) -> str:
    """Milliseconds by size and codec; how much quicker 8 bits are than 32, and 1 bit than 8."""
    lines = [
        f"Encode, send at {link}, decode; medians in milliseconds.",
        "",
        "| values | " + " | ".join(f"`{name}`" for name in SENT) + " | 8-bit over 32-bit | 1-bit over 8-bit |",
        "|---|" + "---|" * (len(SENT) + 2),
    ]
    for row in rows:
        by_name = {each["codec"]: each for each in row["results"]}
        times = " | ".join(f"{1e3 * by_name[name]['seconds']:.2f}" for name in SENT)
        quicker = by_name["dynamic8"]["speed_up_over_fp32"], by_name["onebit"]["speed_up_over_dynamic8"]
        lines.append(f"| {row['numel']:,} | {times} | {quicker[0]:.2f} × | {quicker[1]:.2f} × |")
    return "\n".join(lines)


def write(path: Path, content: dict[str, Any]) -> None:
    """Keep a record, and on which machine and commit it was made."""
    files.replace(path, json.dumps({"environment": environment(), **content}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--mnist", action="store_true", help="the F tests, from the parity runs")
    which.add_argument("--cifar", action="store_true", help="train cuda-convnet by every type")
    which.add_argument("--transfer", action="store_true", help="transfer times")
    parser.add_argument("--parity", type=Path, default=RESULTS / "parity-mnist.json", help="for --mnist")
    parser.add_argument("--types", default=",".join((FP32, *TYPES)), help="for --cifar")
    parser.add_argument("--epochs", type=int, default=6, help="for --cifar; six take about 5 minutes on 2 cores")
    parser.add_argument("--rate", type=float, default=0.06, help="for --cifar: the learning rate at its highest")
    parser.add_argument("--fraction", type=float, default=1.0, help="for --cifar: of all steps, to try it out")
    parser.add_argument("--workers", type=int, default=2, help="for --cifar")
    parser.add_argument("--seeds", default="0,1,2", help="for --cifar")
    parser.add_argument("--link", default="1gbit", help="for --transfer")
    parser.add_argument("--numels", default=",".join(map(str, NUMELS)), help="for --transfer")
    parser.add_argument("--seconds", type=float, default=5.0, help="for --transfer: to spend on each size")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/8bit-cifar.json, 8bit-transfer.json")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        if options.mnist:
            print(mnist(options.parity))
        elif options.cifar:
            settings = Settings(options.epochs, options.rate, options.fraction, options.workers)
            seeds = [int(part) for part in options.seeds.split(",")]
            print(trained(settings, options.types.split(","), seeds, options.output or RESULTS / "8bit-cifar.json"))
        else:
            numels = [int(float(part)) for part in options.numels.split(",")]
            print(transfer(options.link, numels, options.seconds, options.output or RESULTS / "8bit-transfer.json"))
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
