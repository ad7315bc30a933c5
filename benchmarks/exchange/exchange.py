"""The speed of compressed exchange on an emulated cluster, beside DDP and torch's own hooks, in one run.

    python -m benchmarks exchange --links 1gbit,100mbit,unlimited --codecs dynamic8,'topk(0.01)+qsgd(4)' \\
        --output FILE

Needs root (each host is a network namespace behind `tc tbf`). One process per host trains 784-1024-1024-10 with SGD on
MNIST from LACONIC_DATA (on random images without it). For each link all configurations live in the same processes and
take turns in short blocks, their order rotating, so that a slow minute of the machine falls on all of them; each of
ours communicates on a process group of its own, as if it were alone in its process.

A step is zero_grad, forward, backward and optimiser; its time is the slowest rank's. The first step of each block is
not counted: it brings the model back into the caches. Figures are medians with the 95 % interval by ranks. Bytes are
what the host's interface sent, headers and acknowledgements included. After the same number of steps for all, the
training loss on the same images is taken, and whether the replicas of all ranks are bit-identical.

"no communication" is the floor: the same step without any exchange. The other limit is the wire: a ring all-reduce of
fp32 sends 2(P−1)/P of the gradient, at the link's rate.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import argparse
import gzip
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput, LaconicError
from laconic.exchange.collectives import world_of
from laconic.statistics import median
from laconic.transports.world import World
from laconic_lab.clusters.cluster import Cluster, emulated, interface_nbytes
from laconic_lab.environment import environment

EVALUATED = 2048  # training images the loss is taken on
NO_COMMUNICATION, DDP, DDP_FP16 = "no communication", "ddp", "ddp-fp16"
POWERSGD = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}  # torch's rank; its 1000 plain steps left out


@dataclass(frozen=True)
class Task:
    """What every rank does."""

    configurations: tuple[str, ...]
    batch: int
    blocks: int
    steps: int
    warm_up: int
    learning_rate: float
    seed: int


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_fp16(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return wrapped


def ddp_powersgd(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    # Its second all-reduce starts in a callback: with two buckets, ranks disagree on the order and gloo aborts.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=25)
    wrapped.register_comm_hook(PowerSGDState(None, **POWERSGD), powerSGD_hook)
    return wrapped


PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    NO_COMMUNICATION: plain,
    DDP: ddp,
    DDP_FP16: ddp_fp16,
    "ddp-powersgd": ddp_powersgd,
}


def compressed(model: nn.Module, spec: str) -> nn.Module:
    """DDP with Laconic's hook; every name that is not a peer's is a codec's spec, or "auto"."""
    import laconic

    wrapped = DistributedDataParallel(model)
    laconic.compress(wrapped, spec, world=own_world())
    return wrapped


def own_world() -> World:
    """A world of a model's own, as it has when it is the only one in its process."""
    return world_of(dist.new_group())


DISTRIBUTE = "distribute:"  # before a spec: laconic.distribute on the plain model instead of a hook on DDP


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )  # fmt: skip


class Trainee:
    """One configuration on this rank: a model, its optimiser, and where it stands in the data."""

    def __init__(self, name: str, task: Task, images: Tensor, labels: Tensor) -> None:
        torch.manual_seed(task.seed)  # the same initial weights everywhere
        plain_model = name in PEERS or name.startswith(DISTRIBUTE)
        self.model = PEERS.get(name, plain)(network()) if plain_model else compressed(network(), name)
        self.optimizer = torch.optim.SGD(self.model.parameters(), task.learning_rate)
        if name.startswith(DISTRIBUTE):
            import laconic

            laconic.distribute(self.model, self.optimizer, codec=name.removeprefix(DISTRIBUTE), world=own_world())
        self.images, self.labels, self.batch = images, labels, task.batch
        self.position = 0
        self.seconds: list[float] = []
        self.sent_nbytes = 0
        self.sent_steps = 0

    def block(self, steps: int) -> list[float]:
        """Seconds of each step; all ranks begin together."""
        dist.barrier()
        seconds = []
        for _ in range(steps):
            images, labels = self._next()
            begun = time.perf_counter()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def measure(self, steps: int) -> None:
        """One counted block: `steps` after an uncounted first."""
        before = interface_nbytes()
        self.seconds += self.block(1 + steps)[1:]
        dist.barrier()
        self.sent_nbytes += interface_nbytes() - before
        self.sent_steps += 1 + steps

    def _next(self) -> tuple[Tensor, Tensor]:
        stop = self.position + self.batch
        if stop > len(self.images):
            self.position, stop = 0, self.batch
        taken = slice(self.position, stop)
        self.position = stop
        return self.images[taken], self.labels[taken]

    def loss(self, images: Tensor, labels: Tensor) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.model(images), labels))

    def is_same_everywhere(self) -> bool:
        """Whether all ranks hold bit-identical parameters."""
        mine = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        same = torch.tensor([int(torch.equal(mine.view(torch.int32), theirs.view(torch.int32)))])
        dist.all_reduce(same, dist.ReduceOp.MIN)
        return bool(same.item())


def run_rank(task: Task) -> dict[str, Any]:
    """One rank's times, bytes, losses, by configuration."""
    dist.init_process_group("gloo")
    try:
        images, labels, source = load_data(task.seed)
        shard = slice(dist.get_rank(), None, dist.get_world_size())
        own = images[shard].contiguous(), labels[shard].contiguous()
        trainees = {name: Trainee(name, task, *own) for name in task.configurations}
        for trainee in trainees.values():
            trainee.block(task.warm_up)
        names = list(trainees)
        for block in range(task.blocks):
            turn = block % len(names)
            for name in names[turn:] + names[:turn]:
                trainees[name].measure(task.steps)
        sample = images[:EVALUATED], labels[:EVALUATED]
        return {
            "data": source,
            "parameters": sum(parameter.numel() for parameter in network().parameters()),
            "results": {
                name: {
                    "seconds": trainee.seconds,
                    "sent_nbytes_per_step": trainee.sent_nbytes / trainee.sent_steps,
                    "loss": trainee.loss(*sample),
                    "replicas_identical": trainee.is_same_everywhere(),
                }
                for name, trainee in trainees.items()
            },
        }
    finally:
        dist.destroy_process_group()


def load_data(seed: int) -> tuple[Tensor, Tensor, str]:
    """Images (n × 784, 0 to 1), labels, and what they are."""
    root = os.environ.get("LACONIC_DATA")
    if root is None:
        generator = torch.Generator().manual_seed(seed)
        images = torch.rand(8192, 784, generator=generator)
        return images, torch.randint(10, (8192,), generator=generator), "random (LACONIC_DATA is not set)"
    images = read_idx(Path(root, "mnist", "train-images-idx3-ubyte.gz")).flatten(1)
    labels = read_idx(Path(root, "mnist", "train-labels-idx1-ubyte.gz"))
    return images.float() / 255, labels.long(), "MNIST"


def read_idx(path: Path) -> Tensor:
    """The bytes of an IDX file: two zero bytes, a type, the number of dimensions, each dimension, the values."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"{path} cannot be read: {reason}; unset LACONIC_DATA for random images") from None
    dimensions = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    values = torch.frombuffer(bytearray(content[4 + 4 * dimensions :]), dtype=torch.uint8)
    if content[:3] != b"\0\0\x08" or values.numel() != torch.Size(shape).numel():
        raise BadInput(f"{path} is no IDX file of bytes, or is cut short")
    return values.reshape(shape)


def measure_link(link: str, hosts: int, task: Task, timeout_s: float) -> dict[str, Any]:
    """The rows of one link."""
    load = os.getloadavg()[0]
    with Cluster(hosts, link) as cluster:
        ranks = cluster.run(run_rank, (task,), timeout_s=timeout_s)
    rows = [summary(name, [rank["results"][name] for rank in ranks]) for name in task.configurations]
    median = {row["configuration"]: row["step_seconds"] for row in rows}
    for row in rows:
        row["speedup_over_ddp"] = median[DDP] / row["step_seconds"]
        row["speedup_over_ddp_fp16"] = median[DDP_FP16] / row["step_seconds"]
        row["ratio_to_no_communication"] = row["step_seconds"] / median[NO_COMMUNICATION]
    wire_nbytes = 2 * (hosts - 1) / hosts * 4 * ranks[0]["parameters"]
    rate = emulated(link).rate_bps
    return {
        "link": link,
        "hosts": hosts,
        "data": ranks[0]["data"],
        "parameters": ranks[0]["parameters"],
        "load_average_before": load,
        "task": asdict(task),
        "fp32_ring_nbytes": wire_nbytes,
        "fp32_ring_wire_seconds": None if rate is None else 8 * wire_nbytes / rate,
        "results": rows,
    }


def summary(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One configuration's row; a step takes as long as on its slowest rank."""
    seconds = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return {
        "configuration": name,
        "step_seconds": statistics.median(seconds),
        "step_seconds_interval": median(seconds).interval,
        "step_seconds_least": min(seconds),
        "steps": len(seconds),
        "sent_nbytes_per_step": statistics.mean(rank["sent_nbytes_per_step"] for rank in ranks),
        "loss": ranks[0]["loss"],
        "replicas_identical": ranks[0]["replicas_identical"],
        "seconds": seconds,
    }


def table(record: dict[str, Any]) -> str:
    """One link's rows, for people."""
    wire = record["fp32_ring_wire_seconds"]
    lines = [
        f"link {record['link']}, {record['hosts']} hosts, data {record['data']}, "
        f"load before {record['load_average_before']:.1f}, "
        + (f"fp32 ring at wire speed {1e3 * wire:.0f} ms" if wire else "no wire limit"),
        f"{'configuration':30} {'step ms':>9} {'95 % interval':>17} {'×ddp':>6} {'×fp16':>6} {'/no comm':>8} "
        f"{'MB sent':>8} {'loss':>7} replicas",
    ]
    for row in record["results"]:
        low, high = (1e3 * value for value in row["step_seconds_interval"])
        lines.append(
            f"{row['configuration']:30} {1e3 * row['step_seconds']:9.1f} {f'{low:.1f} to {high:.1f}':>17} "
            f"{row['speedup_over_ddp']:6.2f} {row['speedup_over_ddp_fp16']:6.2f} "
            f"{row['ratio_to_no_communication']:8.2f} {row['sent_nbytes_per_step'] / 1e6:8.3f} {row['loss']:7.4f} "
            f"{'identical' if row['replicas_identical'] else 'differ'}"
        )
    return "\n".join(lines)


def split_specs(text: str) -> list[str]:
    """Split at commas outside parentheses: 'a(1,2),b' → ['a(1,2)', 'b']."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="1gbit,100mbit,unlimited", help="one after the other")
    parser.add_argument("--codecs", default="", help="specs for compress; distribute:SPEC for distribute")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="per worker")
    parser.add_argument("--blocks", type=int, default=5, help="per configuration")
    parser.add_argument("--steps", type=int, default=12, help="counted per block; a third below 500 Mbit/s")
    parser.add_argument("--warm-up", type=int, default=4, help="steps per configuration before the first block")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, per link")
    parser.add_argument("--output", type=Path, help="the record as JSON; to stdout without it")
    options = parser.parse_args()
    names = (*PEERS, *split_specs(options.codecs))
    records = []
    try:
        for link in split_specs(options.links):
            rate = emulated(link).rate_bps
            steps = options.steps if rate is None or rate >= 500e6 else max(3, options.steps // 3)
            sizes = options.batch, options.blocks, steps, options.warm_up
            task = Task(names, *sizes, options.learning_rate, options.seed)
            records.append(measure_link(link, options.hosts, task, options.timeout))
            print(table(records[-1]), file=sys.stderr, flush=True)
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    peers = {"ddp-powersgd": POWERSGD}
    record = {"benchmark": "exchange", "environment": environment(), "peers": peers, "links": records}
    text = json.dumps(record, indent=1)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")
    return 0
