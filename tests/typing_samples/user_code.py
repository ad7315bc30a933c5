"""What users write, as a type checker sees it; `tests/test_types.py` checks this file, and nobody runs it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.exchange import DeepGradientCompression, Options
from laconic.parallel import Stages
from laconic.schedules import Link


def one_line(ddp: DistributedDataParallel) -> str:
    """The door of DDP scripts, with its options."""
    job = laconic.compress(ddp, "topk(0.01)+qsgd(4)", exempt=["head"], momentum=DeepGradientCompression(0.9))
    with laconic.compress(ddp, {0: "none", 100: "dynamic8"}, algorithm="ring", message_nbytes=1 << 20):
        pass
    job.finish()
    return job.explain()


def plain_loop(model: nn.Module, x: Tensor, folder: Path) -> laconic.Job:
    """Without DDP: a job, checkpoints, the state of the exchange."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = laconic.distribute(model, optimizer, codec="dynamic8", consistency="local(8)", world=laconic.init())
    laconic.Checkpoints(folder).save(1, model=model, optimizer=optimizer)
    model(x).sum().backward()
    optimizer.step()
    return job


def members(model: nn.Module, x: Tensor, folder: Path) -> int:
    """Workers that come and go."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = laconic.Samples(1000, batch=10)
    with laconic.elastic(model, optimizer, data, folder, workers=2, drop_slowest=1) as job:
        for batch in job.batches():
            model(x[batch]).square().mean().backward()
            job.step()
        return job.steps


def stages(model: nn.Module, x: Tensor) -> Tensor | None:
    """A pipeline has what a module has not."""
    pipeline = laconic.divide(model, Stages(micro=4), codec="dynamic8")
    return pipeline.step(x, x, lambda found, wanted: (found - wanted).square().mean())


def collectives(world: laconic.World) -> Tensor:
    """The pieces, alone."""
    total = laconic.all_reduce(torch.ones(3), codec="dynamic8", group=world)
    payload = laconic.codec("qsgd(bits=4)").encode(total)
    return laconic.codec("qsgd(bits=4)").decode(payload, 3)


def before(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """What it will cost."""
    found = laconic.plan(model, laconic.planner.Asked(8, "1gbit,50us"))
    print(laconic.operators.plan_of(laconic.tune(model, x)), Link.parse("1gbit").latency_s, Options().algorithm)
    return found.chosen.seconds, laconic.cost(model, sample=(3, 32, 32)).total("parameters")


def after(model: nn.Module, folder: Path) -> laconic.searching.Result:
    """A small file, and a search."""
    try:
        laconic.shrink(model, budget=0.01).save(folder / "model.lac")
    except laconic.errors.LaconicError as error:
        print(error)
    return laconic.search(lambda trial: trial.params["x"], "x = float(0, 1)", "random", 20, folder=folder, seed=1)
