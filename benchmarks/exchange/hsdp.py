"""FSDP2 and HSDP on emulated hosts with two ranks each, torch's beside ours: seconds, bytes between hosts and loss.

    python -m benchmarks hsdp --link 200mbit --output benchmarks/results/hsdp.json          (some minutes; root)

All ways train the same model on the same data, each from the same start, in the same processes, and take turns. Bytes
are of a host's network interface, headers and acknowledgements included: what ranks of one host tell each other does
not cross it. On the 2-D mesh a host holds one replica; on the 1-D mesh shards lie on all hosts, and weights cross, too.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import statistics
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.cli.shared import Json, echo_json
from laconic.storage import files
from laconic.workloads import get
from laconic.workloads.workload import Task
from laconic_lab.bench.turns import SENT, Turns, Way, conditions, host, slowest, timing
from laconic_lab.clusters.cluster import Cluster

PER_HOST = 2
WAYS: dict[str, tuple[int, dict[str, Any] | None]] = {  # dimensions of the mesh, and options of compress
    "torch HSDP": (2, None),
    "HSDP none": (2, {"codec": "none"}),
    "HSDP dynamic8": (2, {"codec": "dynamic8"}),
    "HSDP int4": (2, {"codec": "int4"}),
    "torch FSDP2": (1, None),
    "FSDP2 dynamic8": (1, {"codec": "dynamic8"}),
    "FSDP2 dynamic8, weights dynamic8": (1, {"codec": "dynamic8", "weights": "dynamic8"}),
    "FSDP2 dynamic8, weights differences+int4": (1, {"codec": "dynamic8", "weights": "differences+int4"}),
}


def trainer(task: Task, dimensions: int, options: dict[str, Any] | None) -> Callable[[], dict[str, float]]:
    """A function that trains one step and gives its loss."""
    model, size, rank = task.workload.build(task.seed), dist.get_world_size(), dist.get_rank()
    shape = (size // PER_HOST, PER_HOST) if dimensions == 2 else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("host", "rank")[-dimensions:])
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if options is not None:
        laconic.compress(model, **options)
    optimizer, place = task.optimizer(model.parameters()), iter(range(10**9))

    def step() -> dict[str, float]:
        epoch, number = divmod(next(place), task.steps_per_epoch(size))
        task.begin_step(optimizer, epoch, number, rank, size)
        loss = task.loss(model, task.batch(epoch, number, rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.detach().clone()
        dist.all_reduce(found)
        return {"loss": found.item() / size}

    return step


def run_rank(workload: str, ways: list[str], blocks: int, calls: int, link: str) -> dict[str, Any]:
    """One rank's part."""
    with host():
        task = get(workload).prepare(seed=0)
        steps = {name: trainer(task, *WAYS[name]) for name in ways}
        turns = Turns({name: Way(step, calls=calls, lead=1) for name, step in steps.items()}, link, dist.barrier)
        return turns.run(blocks)


def row(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a way took: the slowest rank's seconds, a host's bytes a step, the mean loss of the last block."""
    own = [rank[name] for rank in ranks]
    nbytes = statistics.median(own[0][SENT])
    return {"way": name, **timing("step", slowest(own)), "host_sent_nbytes": nbytes, "loss": own[0]["loss"][-1]}


def table(record: dict[str, Any]) -> str:
    """The rows for docs/guides/fsdp2.md."""
    rows = record["results"]
    base = {kind: next((r for r in rows if r["way"] == f"torch {kind}"), None) for kind in ("HSDP", "FSDP2")}
    lines = ["| way | a step | × torch | a host sends a step | × torch | loss |", "|---|---|---|---|---|---|"]
    for each in rows:
        torchs = base["HSDP" if "HSDP" in each["way"] else "FSDP2"]
        low, high = each["step_seconds_interval"]
        faster = "" if torchs is None else f"{torchs['step_seconds'] / each['step_seconds']:.2f}"
        fewer = "" if torchs is None else f"{each['host_sent_nbytes'] / torchs['host_sent_nbytes']:.3f}"
        lines.append(
            f"| {each['way']} | {1e3 * each['step_seconds']:.0f} ms ({1e3 * low:.0f} to {1e3 * high:.0f}) | {faster} | "
            f"{each['host_sent_nbytes'] / 1e6:.2f} MB | {fewer} | {each['loss']:.4f} |"
        )
    return "\n".join([*lines, "", f"Load of the machine before: {record['load_average_before']:.1f}."])


def main(
    workload: Annotated[str, typer.Option(help="A transformer whose layers are in `blocks`.")] = "shakespeare-gpt",
    link: Annotated[str, typer.Option(help="Of each host.")] = "200mbit",
    hosts: Annotated[int, typer.Option(help="With two ranks each.")] = 2,
    blocks: Annotated[int, typer.Option(help="Turns of each way that count.")] = 7,
    calls: Annotated[int, typer.Option(help="Steps a turn.")] = 5,
    ways: Annotated[list[str] | None, typer.Option("--way", help="One of them; may be given several times.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the record.")] = None,
    json: Json = False,
) -> None:
    """Measure FSDP2 and HSDP, torch's and ours."""
    chosen = ways or list(WAYS)
    if strange := [name for name in chosen if name not in WAYS]:
        raise laconic.errors.UnknownName("way", strange[0], WAYS)
    record = {**conditions(hosts=PER_HOST * hosts), "workload": workload, "link": link, "hosts": hosts}
    with Cluster(hosts, link) as cluster:
        found = cluster.run(run_rank, (workload, chosen, blocks, calls, link), PER_HOST, timeout_s=3600.0)
    record["results"] = [row(name, found) for name in chosen]
    if output is not None:
        files.replace(output, dumps(record, indent=1) + "\n")
    if json:
        echo_json(record)
    else:
        typer.echo(table(record))


if __name__ == "__main__":
    typer.run(main)
