"""When each bucket of an overlapped step is made, sent and needed, for a GPT whose layers sleep instead of computing.

    python -m benchmarks profile-overlap --link 100mbit            (root; about 20 seconds)

Sleeping needs no processor, so that the timeline shows the order of buckets, the wire and the waits, also on a machine
that does other things. What computing and the exchange take from each other on a core is not in it: that is what
`laconic bench step` measures. Prints the median step with and without overlap, and two steps by bucket.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.transports.world import init
from laconic_lab.clusters.cluster import Cluster, core_of

WIDTH, CHARACTERS, BLOCKS = 256, 65, 4
WARM_UP = 12  # by then buckets are sent in the order that measured times have given
# of a block: shape, and shares of its time in forward and backward
BLOCK = (
    ((WIDTH,), 0.05, 0.1), ((3 * WIDTH, WIDTH), 1.0, 2.0), ((WIDTH, WIDTH), 0.6, 1.2),
    ((WIDTH,), 0.05, 0.1), ((4 * WIDTH, WIDTH), 1.2, 2.3), ((WIDTH, 4 * WIDTH), 1.1, 2.2),
)  # fmt: skip


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: tuple[float, float]) -> Tensor:
        forward_s, ctx.backward_s = seconds
        time.sleep(forward_s)
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], ctx.gradient.clone(), None, None


class Sleeper(nn.Module):
    """A layer that has weights and takes its time."""

    def __init__(self, shape: tuple[int, ...], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.gradient = torch.randn(shape) * 1e-3
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Asleep.apply(x, self.weight, self.gradient, self.seconds)  # type: ignore[no-untyped-call]
        return slept


def make(compute_s: float) -> nn.Module:
    """Embedding, blocks and a head that is tied to the embedding; together they take `compute_s`."""
    unit = compute_s / (BLOCKS * sum(forward + backward for _, forward, backward in BLOCK) + 1.7)
    layers = [Sleeper((CHARACTERS, WIDTH), 0.1 * unit, 0.1 * unit)]
    layers += [Sleeper(shape, f * unit, b * unit) for _ in range(BLOCKS) for shape, f, b in BLOCK]
    head = Sleeper((CHARACTERS, WIDTH), 0.5 * unit, unit)
    head.weight = layers[0].weight
    return nn.Sequential(*layers, head)


def run_rank(compute_s: float, steps: int, overlap: bool | None) -> dict[str, Any]:
    """Train; when each step began, the records of the buckets, and the waits."""
    os.sched_setaffinity(0, {core_of(int(os.environ["RANK"]))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with init(timeout_s=100) as world:
        model = make(compute_s)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        job: Any = laconic.distribute(model, optimizer, codec="dynamic8", overlap=overlap, world=world)
        x, begun = torch.zeros(1, requires_grad=True), list[float]()
        for _ in range(WARM_UP + steps):
            begun.append(time.perf_counter())
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        job.finish()
        records = [vars(record) for record in job.state.records if record.step >= WARM_UP]
        found = {"begun": begun[WARM_UP:], "records": records, "waits": list(job.sink.waits) if job.sink else []}
        job.close()
    dist.destroy_process_group()
    return found


def show(found: dict[str, Any], begun: float, ended: float) -> None:
    """One step: where the training waits, and each bucket on its way, in the order they were sent."""
    waits = [f"{1e3 * (a - begun):.0f} for {1e3 * (b - a):.0f}" for a, b in found["waits"] if begun <= a < ended]
    print(f"a step of {1e3 * (ended - begun):.0f} ms; the training waits at {', '.join(waits)}")
    for record in sorted(found["records"], key=lambda each: float(each["begun"])):
        if begun <= record["made"] < ended:
            times = (record["made"], record["begun"], record["begun"] + record["seconds"])
            made, sent, came = (f"{1e3 * (each - begun):6.1f}" for each in times)
            print(
                f"  bucket {record['bucket']:2}: made {made}, begun {sent}, ended {came}, {record['sent_nbytes']} bytes"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--compute", type=float, default=155.0, help="milliseconds a step sleeps")
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    for overlap in (False, None):
        with Cluster(2, asked.link) as cluster:
            found = cluster.run(run_rank, (asked.compute / 1e3, asked.steps, overlap), timeout_s=300)[0]
        begun = found["begun"]
        step_s = statistics.median(after - before for before, after in pairwise(begun))
        print(f"{'with' if overlap is None else 'without'} overlap: {1e3 * step_s:.0f} ms a step")
    for number in (-3, -2):
        show(found, begun[number], begun[number + 1])
