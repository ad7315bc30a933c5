"""What metrics cost of a training step: `job.metrics()` and a line of JSON every tenth step, beside steps without.

    python -m benchmarks metrics-cost                                                        (about a minute)

A ResNet-20-sized step of `distribute` on one rank of two on loopback; a slow link only makes the share smaller. The
share is measured directly, as the time spent in the log beside the time of the steps, not as a difference of two.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import laconic
from laconic.cli.shared import Json, echo_json
from laconic.exchange.buckets import SAMPLE, SAMPLED
from laconic.integrations.loggers import JsonLines
from laconic_lab.bench.turns import conditions, host, on_hosts, seconds_of


def run_rank(width: int, steps: int, codec: str) -> dict[str, Any]:
    """One rank's part: seconds of a step, of the log a step, and of the error's sample a step."""
    with host(pin=False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        optimizer, coder = torch.optim.SGD(model.parameters(), 0.01), laconic.codec(codec)
        logged = 0.0
        with tempfile.TemporaryDirectory() as folder, laconic.distribute(model, optimizer, codec=codec) as job:
            log = JsonLines(Path(folder) / "run.jsonl")
            for step in range(steps + 10):
                if step == 10:
                    begun, logged = time.perf_counter(), 0.0
                optimizer.zero_grad()
                model(torch.randn(64, width)).square().mean().backward()
                optimizer.step()
                logged += seconds_of(lambda: log(job, loss=1.0))
            seconds = (time.perf_counter() - begun) / steps
            job.finish()
        values = torch.randn(SAMPLE)
        sampled = min(seconds_of(lambda: coder.decode(coder.encode(values), SAMPLE)) for _ in range(5))
    return {"step_seconds": seconds, "log_seconds": logged / steps, "sample_seconds": sampled / SAMPLED}


def main(
    width: Annotated[int, typer.Option(help="Of four square layers.")] = 1024,
    steps: Annotated[int, typer.Option(help="That count.")] = 100,
    codec: Annotated[str, typer.Option(help="Of the gradients.")] = "dynamic8",
    json: Json = False,
) -> None:
    """Measure what metrics cost."""
    record: dict[str, Any] = conditions(hosts=2)
    ranks, _ = on_hosts(2, None, run_rank, (width, steps, codec))
    first = ranks[0]
    share = (first["log_seconds"] + first["sample_seconds"]) / first["step_seconds"]
    record |= {"width": width, "codec": codec, "share_of_a_step": share, "wanted": 0.005, "ranks": ranks}
    if json:
        return echo_json(record)
    typer.echo(f"a step {1e3 * first['step_seconds']:.1f} ms; metrics {100 * share:.3f} % of it (at most 0.5 % wanted)")


if __name__ == "__main__":
    typer.run(main)
