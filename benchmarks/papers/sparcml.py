"""SparCML's MNIST experiment on eight emulated hosts: top 16 of every 512 values at 4 bits against float32.

    LACONIC_DATA=… python -m benchmarks sparcml                    # about 15 minutes on two cores, needs root
    LACONIC_DATA=… python -m benchmarks sparcml --links 100mbit=12 --steps 30 --output /tmp/sparcml.json

Published (Renggli et al., SparCML, 2018; Hoefler, PPAM 2019): an MLP on MNIST, 8 nodes, Top16_Q4, end to end 3.65 times
as quick as dense float32 and 4.53 in communication on Piz Daint, 19.12 and 22.97 on EC2. No link's speed is given with
them. Here one worker trains on each of 8 network namespaces behind `tc tbf`, at the link speeds that are named.

All eight workers share this machine's cores, so what is computed (the step itself, encoding, decoding) takes several
times longer than on eight machines, while the wire takes as long as a real one: the factors are those of a slow link
beside slow workers. The network is 784-1024-1024-10 with dropout, batch 64 a worker, SGD with momentum 0.9 at 0.05
falling linearly to zero.

Accuracy first: float32 and ours train the same steps on links without a limit, and the test accuracy is taken on the
way. What is learnt does not depend on the link, so the time to the target at a link is the steps it took here times the
step's median there; it is a product, not a measurement.

Then time: for each link all configurations live in the same processes and take turns in blocks, their order rotating. A
step is zero_grad, forward, backward and optimiser; its time is the slowest rank's, and the first of each block is not
counted. "Communication" is the exchange alone: every rank has a gradient ready, all begin together, and it ends when
the mean is there; encoding and decoding are part of it.

"no communication" is the floor: each worker alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.errors import BadInput, LaconicError
from laconic.exchange.costs import GUESS
from laconic.exchange.options import Options
from laconic.exchange.state import CompressionState
from laconic.statistics import median, ratio_interval
from laconic.transports.profile import Profile
from laconic.transports.world import World
from laconic.workloads import Task, get
from laconic.workloads.data import fetch
from laconic_lab.bench.turns import rotated, seconds_of
from laconic_lab.clusters.cluster import Cluster, emulated, interface_nbytes
from laconic_lab.environment import environment
from laconic_lab.runs.spec import SINGLE, configuration
from laconic_lab.runs.strategies import make_trainee
from laconic_lab.runs.trainee import Trainee

FLOOR, FP32, FP16, OURS = "no communication", "ddp", "ddp-fp16", "topk(16,bucket=512)+qsgd(4)"
CONFIGURATIONS = (FLOOR, FP32, FP16, OURS)
PUBLISHED = {"Piz Daint": (3.65, 4.53), "EC2": (19.12, 22.97)}  # end to end, communication
OUTPUT = Path(__file__).parents[1] / "results" / "sparcml.json"


@dataclass(frozen=True)
class Plan:
    """What every rank does.

    Attributes:
        configurations: which, in the order of their first turns.
        steps: of training, by every configuration.
        block: steps between two turns; the first of each is not counted.
        evaluates: whether the test accuracy is taken after each block.
        exchanges: of the gradient alone, after each block.
        batch: of all workers together.
        rate: the learning rate at the beginning, which falls linearly to zero.
        rate_bps: what the link is told to carry, for choosing between exchanges of one round and of two.
    """

    configurations: tuple[str, ...]
    steps: int
    block: int
    evaluates: bool
    exchanges: int
    batch: int
    target: float
    seed: int
    rate: float
    rate_bps: float | None


def run_rank(plan: Plan) -> dict[str, Any]:
    """One rank's figures, by configuration."""
    dist.init_process_group("gloo")
    try:
        with laconic.init(timeout_s=300) as world:
            if plan.rate_bps is not None:
                world.profile = Profile(world.engine, world.world_size, replace(GUESS, s_per_byte=8 / plan.rate_bps))
            names = list(plan.configurations)
            runners = {name: Runner(name, plan, world) for name in names}
            for turn, begin in enumerate(range(0, plan.steps, plan.block)):
                for name in rotated(names, turn):
                    runners[name].block(min(plan.block, plan.steps - begin))
                    runners[name].exchange_alone(plan.exchanges)
            return {name: runner.figures() for name, runner in runners.items()}
    finally:
        dist.destroy_process_group()


class Runner:
    """One configuration on this rank."""

    def __init__(self, name: str, plan: Plan, world: World) -> None:
        epochs = -(-plan.steps // (60_000 // plan.batch + 1))
        workload = replace(
            get("mnist-mlp"), optimizer=momentum_sgd, learning_rate=plan.rate, batch=plan.batch, epochs=epochs
        )
        self.task: Task = workload.prepare(plan.seed)
        self.name, self.plan, self.world = name, plan, world
        named = {FLOOR: SINGLE, OURS: f"distribute:{OURS}"}.get(name, name)
        chosen = configuration(named, world.world_size)
        optimizer = self.task.optimizer(self.task.model.parameters())
        self.trainee: Trainee = make_trainee(chosen, self.task.model, optimizer, world)
        self.alone = exchange_of(name, list(self.task.model.named_parameters()), world)
        self.step = 0
        self.step_s: list[float] = []
        self.counted: list[bool] = []
        self.exchange_s: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.sent_nbytes = 0
        for _ in range(2):  # kernels are compiled and connections opened before anything is timed
            self.exchange_alone(1)
        self.exchange_s.clear()

    def block(self, steps: int) -> None:
        """Train, then take the test accuracy on rank 0 if asked to."""
        dist.barrier()
        before = interface_nbytes()
        for i in range(steps):
            self.step_s.append(self._one_step())
            self.counted.append(i > 0)
        dist.barrier()
        self.sent_nbytes += interface_nbytes() - before
        if self.world.rank == 0 and self.plan.evaluates:
            self.curve.append((self.step, self.task.evaluate(self.trainee.module)["accuracy"]))

    def _one_step(self) -> float:
        task, optimizer, place = self.task, self.trainee.optimizer, (self.world.rank, self.world.world_size)
        when = divmod(self.step, task.steps_per_epoch(self.world.world_size))
        batch = task.batch(*when, *place)
        task.begin_step(optimizer, *when, *place)
        # the rate falls to zero within the steps there are, whole epochs or not
        optimizer.param_groups[0]["lr"] = task.workload.learning_rate * (1 - self.step / self.plan.steps)

        def train() -> None:
            optimizer.zero_grad()
            task.loss(self.trainee.model, batch).backward()
            optimizer.step()

        self.step += 1
        return seconds_of(train)

    def exchange_alone(self, repeats: int) -> None:
        """Exchange a gradient that is ready, without computing; it changes nothing of the training."""
        if self.alone is None:
            return
        place = (self.world.rank, self.world.world_size)
        parameters = list(self.task.model.parameters())
        loss = self.task.loss(self.task.model, self.task.batch(0, 0, *place))
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        for _ in range(repeats):
            values = gradient.clone()
            dist.barrier()
            self.exchange_s.append(seconds_of(partial(self.alone, values)))

    def figures(self) -> dict[str, Any]:
        weights = torch.cat([p.detach().reshape(-1) for p in self.task.model.parameters()])
        first = weights.clone()
        dist.broadcast(first, 0)
        same = torch.tensor(float(torch.equal(first, weights)))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        return {
            "step_s": self.step_s, "counted": self.counted, "exchange_s": self.exchange_s, "curve": self.curve,
            "sent_nbytes_per_step": self.sent_nbytes / self.step, "replicas_identical": bool(same.item()),
            "parameters": weights.numel(),
        }  # fmt: skip


def momentum_sgd(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def exchange_of(name: str, named: list[tuple[str, Any]], world: World) -> Callable[[Tensor], None] | None:
    """How a configuration averages a flat gradient over the ranks, by itself; None for the floor."""
    if name == FLOOR:
        return None
    if name == OURS:
        state = CompressionState(OURS, named, Options(world=world))
        return lambda values: state.buckets.exchange([(values, [parameter for _, parameter in named])])

    def native(values: Tensor) -> None:
        short = values.half() if name == FP16 else values
        short.div_(world.world_size)
        dist.all_reduce(short)
        if short is not values:
            values.copy_(short)

    return native


def measure(link: str, hosts: int, plan: Plan, timeout_s: float) -> dict[str, Any]:
    """The record of one link."""
    load = os.getloadavg()[0]
    with Cluster(hosts, link) as cluster:
        ranks = cluster.run(run_rank, (plan,), timeout_s=timeout_s)
    rows = [summary(name, [rank[name] for rank in ranks], plan) for name in plan.configurations]
    wire_nbytes = 2 * (hosts - 1) / hosts * 4 * ranks[0][FP32]["parameters"]
    return {
        "link": link, "hosts": hosts, "plan": asdict(plan), "load_average_before": load,
        "fp32_wire_seconds": None if plan.rate_bps is None else 8 * wire_nbytes / plan.rate_bps, "results": rows,
    }  # fmt: skip


def with_factors(record: dict[str, Any], learnt: dict[str, Any]) -> dict[str, Any]:
    """Add to each row of a link its speed-ups, and the accuracy and steps to the target that were found apart."""
    by_name = {row["configuration"]: row for row in record["results"]}
    accuracies = {row["configuration"]: row for row in learnt["results"]}
    for name, row in by_name.items():
        for base in (FP32, FP16):
            for what in ("step", "exchange"):
                ours, theirs = row[f"{what}_s"], by_name[base][f"{what}_s"]
                if ours and theirs:
                    row[f"{what}_speed_up_over_{base}"] = statistics.median(theirs) / statistics.median(ours)
                    row[f"{what}_speed_up_over_{base}_interval"] = ratio_interval(ours, theirs, paired=False)
        if name in accuracies:
            steps = row["steps_to_target"] = accuracies[name]["steps_to_target"]
            row["test_accuracy"] = accuracies[name]["test_accuracy"]
            row["predicted_seconds_to_target"] = None if steps is None else steps * row["step_seconds"]
    return record


def summary(name: str, ranks: list[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """One configuration's row; a step and an exchange take as long as on their slowest rank."""
    every = [max(step) for step in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    steps = [seconds for seconds, counts in zip(every, ranks[0]["counted"], strict=True) if counts]
    exchanges = [max(one) for one in zip(*(rank["exchange_s"] for rank in ranks), strict=True)]
    curve = ranks[0]["curve"]
    reached = next((step for step, accuracy in curve if accuracy >= plan.target), None)
    return {
        "configuration": name,
        "step_seconds": statistics.median(steps),
        "step_seconds_interval": median(steps).interval,
        "exchange_seconds": statistics.median(exchanges) if exchanges else None,
        "exchange_seconds_interval": median(exchanges).interval if exchanges else None,
        "test_accuracy": curve[-1][1] if curve else None,
        "steps_to_target": reached,
        "steps": len(every),
        "sent_nbytes_per_step": statistics.mean(rank["sent_nbytes_per_step"] for rank in ranks),
        "replicas_identical": ranks[0]["replicas_identical"],
        "curve": curve, "step_s": steps, "exchange_s": exchanges,
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """All links as Markdown."""
    lines = [
        "| link | configuration | step, ms | exchange alone, ms | MB sent a step | test accuracy | "
        "steps × step to target | end to end (communication) over fp32 | over fp16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        for row in record["results"]:
            name, accuracy = row["configuration"], row["test_accuracy"]
            seconds = row.get("predicted_seconds_to_target")
            cells = [
                record["link"],
                FLOOR if name == FLOOR else f"`{name}`",
                f"{1e3 * row['step_seconds']:.0f}",
                "–" if name == FLOOR else f"{1e3 * row['exchange_seconds']:.0f}",
                f"{row['sent_nbytes_per_step'] / 1e6:.3f}",
                "–" if accuracy is None else f"{100 * accuracy:.2f} %",
                "–" if seconds is None else f"{row['steps_to_target']} steps, {seconds:.0f} s",
                "–" if name == FLOOR else _factors(row, FP32),
                "–" if name == FLOOR else _factors(row, FP16),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _factors(row: dict[str, Any], base: str) -> str:
    return f"{row[f'step_speed_up_over_{base}']:.2f} ({row[f'exchange_speed_up_over_{base}']:.2f})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", default="1gbit=40,100mbit=24,20mbit=12", help="each with its timed steps; none: accuracy alone"
    )
    parser.add_argument("--steps", type=int, default=1180, help="of training for the accuracy; 118 are an epoch")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="per worker")
    parser.add_argument("--evaluations", type=int, default=20, help="during the training for the accuracy")
    parser.add_argument("--block", type=int, default=6, help="steps of a turn")
    parser.add_argument("--exchanges", type=int, default=3, help="of the gradient alone, after each turn")
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate at the beginning")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds, per link")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def stored_accuracy(path: Path, plan: Plan) -> dict[str, Any] | None:
    """What an earlier run learnt by the same plan: it does not depend on the links, and takes the longest."""
    found = json.loads(path.read_text())["accuracy"] if path.exists() else None
    return found if found is not None and found["plan"] == json.loads(json.dumps(asdict(plan))) else None


def write(path: Path, learnt: dict[str, Any], records: list[dict[str, Any]]) -> None:
    content = {"benchmark": "sparcml", "environment": environment(), "published": PUBLISHED, "accuracy": learnt}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**content, "links": records}, indent=1) + "\n")
    part.replace(path)


def parsed(part: str) -> tuple[str, int]:
    """A link and its steps from "100mbit=24"."""
    link, _, steps = part.partition("=")
    if not steps.isdigit() or int(steps) < 2:
        raise BadInput(f"--links takes a link and its steps, such as 100mbit=24, got '{part}'")
    emulated(link)
    return link, int(steps)


def main() -> int:
    options = arguments()
    rest = options.hosts * options.batch, options.target, options.seed, options.rate
    try:
        fetch("mnist")
        links = [] if options.links == "none" else [parsed(part) for part in options.links.split(",")]
        block = max(2, -(-options.steps // options.evaluations))
        plan = Plan((FP32, OURS), options.steps, block, True, 0, *rest, None)
        learnt = stored_accuracy(options.output, plan) or measure("unlimited", options.hosts, plan, options.timeout)
        write(options.output, learnt, [])
        for row in learnt["results"]:
            text = f"{row['configuration']}: {100 * row['test_accuracy']:.2f} %, target after {row['steps_to_target']}"
            print(f"{text} of {row['steps']} steps", file=sys.stderr, flush=True)
        records = []
        for link, steps in links:
            sizes = steps, options.block, False, options.exchanges
            plan = Plan(CONFIGURATIONS, *sizes, *rest, emulated(link).rate_bps)
            records.append(with_factors(measure(link, options.hosts, plan, options.timeout), learnt))
            print(table(records[-1:]), file=sys.stderr, flush=True)
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write(options.output, learnt, records)
    print(table(records))
    return 0
