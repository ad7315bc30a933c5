"""How little can be sent before a model learns worse: `quality="noise"`, fixed codecs and optimisers for slow links.

    python -m benchmarks learning --short                                                     (a few minutes)
    python -m benchmarks learning --json            (hours; goes on with benchmarks/results/learning.json)

Two ranks on loopback train the same samples in the same order by every way; losses by samples do not depend on the
link, so nothing is emulated, and times mean nothing on a busy machine; measuring's share is of cores' time.
The way `against` has the budget of `noise`, and spends it where an error weighs the most. Rates of the optimisers are
searched for, all alike: each of RATES times its own, on the first seed, by the validation loss; further seeds have the
best. What matters the most is trained first: codecs before optimisers, the first seed of all before the next, so that
a record that was cut short has something of everything. The table has AIMS beside what was reached so far.
"""

from __future__ import annotations

import functools
import json as texts
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import laconic
from benchmarks.wide.curves import stretch
from laconic.cli.shared import Json, echo_json, echo_table
from laconic.codecs import codec
from laconic.exchange.job import wire_nbytes
from laconic.exchange.noise import CANDIDATES, NoiseCodec
from laconic.storage import files
from laconic.transports.launcher import run_local
from laconic.workloads import get
from laconic_lab.bench.turns import host
from laconic_lab.environment import environment

WORKS = {"shakespeare-gpt": 800, "cifar-convnet": 800, "shakespeare-lstm": 800, "mnist-mlp": 590}  # steps
CODECS = ("none", "noise(0.2)", "dynamic8", "int2", "onebit", "topk(0.01)", "int4", "against", "noise(0.5)")
OPTIMIZERS = {"adam:none": 1e-3, "onebit_adam": 1e-3, "adamw:dynamic8": 1e-3, "adamw:topk(0.01)": 1e-3, "demo": 1e-3,
              "dion": 1e-2, "muon": 1e-3}  # fmt: skip
RATES = (0.3, 1.0, 3.0)
RANKS = 2
TIMEOUT_S = 6 * 3600.0
RESULTS = Path(__file__).parents[1] / "results" / "learning.json"


@dataclass(frozen=True)
class Training:
    """One training: `way` is a codec with the work's own optimiser, or an optimiser at `rate` times its usual rate."""

    work: str
    way: str
    seed: int
    steps: int
    rate: float = 1.0


@dataclass(frozen=True)
class Aim:
    """What a way must reach: at most so many times the loss of `base`, by at least so many times fewer bytes.

    Attributes:
        frozen: bytes after the first fifth of the steps, when one-bit optimisers have frozen, are what counts.
    """

    base: str
    loss: float
    fewer: float
    frozen: bool = False


AIMS = {(work, "noise(0.2)"): Aim("none", 1.005, 20.0 if work == "shakespeare-gpt" else 12.0) for work in WORKS}
AIMS["shakespeare-gpt", "onebit_adam"] = Aim("adam:none", 1.01, 20.0, frozen=True)


class Against(NoiseCodec):
    """The same budget, spent the wrong way round: the largest errors beside the noise are allowed first."""

    def _decide(self, step: int, workers: int, buckets: list[int], residual: float) -> None:
        super()._decide(step, workers, buckets, residual)
        sizes = sorted((CANDIDATES.index(spec) for spec in self.chosen.values()), reverse=True)
        worst = sorted(buckets, key=lambda b: self.layers[b].shares(workers)[-1], reverse=True)
        self.chosen = {b: CANDIDATES[i] for b, i in zip(worst, sizes, strict=True)}
        self._plans.append((step + 1, {b: codec(spec) for b, spec in self.chosen.items()}))


def train(training: Training) -> dict[str, Any]:
    """The validation loss at the end, bytes that a rank sent in all, and what float32 would have sent."""
    return run_local(RANKS, run_rank, (training,), TIMEOUT_S)[0]


def run_rank(training: Training) -> dict[str, Any]:
    """Train on this rank."""
    with host(timeout_s=TIMEOUT_S) as world:
        task = get(training.work).prepare(training.seed, scaling="weak")
        stretch(task, training.steps, RANKS)
        optimizer, job = _made(task, training, world)
        usual = [group["lr"] for group in optimizer.param_groups]
        begun, worked = time.perf_counter(), time.process_time()
        before = warm = world.transport.counters.total_sent_nbytes
        for step in range(training.steps):
            if step == _freeze_step(training):
                warm = world.transport.counters.total_sent_nbytes
            epoch, place = divmod(step, task.steps_per_epoch(RANKS))
            task.begin_step(optimizer, epoch, place, world.rank, RANKS)
            if training.way in OPTIMIZERS:  # the work's plan, times the way's rate
                factor = optimizer.param_groups[0]["lr"] / task.workload.learning_rate
                for group, rate in zip(optimizer.param_groups, usual, strict=True):
                    group["lr"] = rate * factor
            optimizer.zero_grad()
            task.loss(task.model, task.batch(epoch, place, world.rank, RANKS)).backward()
            optimizer.step()
        dense = sum(wire_nbytes(p.numel(), RANKS) for p in task.model.parameters()) * training.steps
        found: dict[str, Any] = {"dense_nbytes": dense, "seconds": time.perf_counter() - begun}
        found["cpu_s"] = time.process_time() - worked
        if job is not None:
            job.finish()
            noise = job.state.buckets.noise
            if noise is not None:
                found |= {"noise_s": noise.spent_s, "chosen": noise.chosen, **noise.metrics()}
        ended, late = world.transport.counters.total_sent_nbytes, 1 - _freeze_step(training) / training.steps
        uncounted = training.way in ("none", "adam:none")  # the engine's all-reduce
        found["sent_nbytes"] = dense if uncounted else ended - before
        found |= {"late_dense_nbytes": late * dense, "late_sent_nbytes": late * dense if uncounted else ended - warm}
        found["loss"] = task.evaluate(task.model)["loss"]
        (optimizer if job is None else job).close()
        return found


def _freeze_step(training: Training) -> int:
    return max(1, training.steps // 5)


def _made(task: Any, training: Training, world: laconic.World) -> tuple[Any, Any]:
    """The optimiser, and the job where it has one."""
    name, _, chosen = training.way.partition(":")
    parameters, lr = list(task.model.parameters()), OPTIMIZERS.get(training.way, 0.0) * training.rate
    own: dict[str, Any] = {
        "onebit_adam": functools.partial(laconic.optim.OneBitAdam, freeze_step=_freeze_step(training)),
        "demo": laconic.optim.DeMo, "dion": laconic.optim.Dion,
    }  # fmt: skip
    if name in own:
        return own[name](parameters, lr=lr, world=world), None
    made: dict[str, Any] = {
        "muon": laconic.optim.Muon, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam,
    }  # fmt: skip
    optimizer = made[name](_groups(task.model), lr=lr) if name in made else task.optimizer(parameters)
    spec = chosen or ("dynamic8" if name == "muon" else training.way)
    quality = {"noise": spec, "against": "noise"}.get(spec.partition("(")[0])
    options = {"codec": spec} if quality is None else {"codec": "auto", "quality": quality}
    job = laconic.distribute(task.model, optimizer, world=world, **options)  # type: ignore[arg-type]
    if training.way == "against":
        job.state.buckets.choice = Against()  # type: ignore[attr-defined]
    return optimizer, job


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}] if vectors else [{"params": matrices}]


def trainings(
    works: list[str], ways: list[str], seeds: int, steps: int | None, rates: tuple[float, ...],
    kept: list[dict[str, Any]],
) -> Iterator[Training]:  # fmt: skip
    """Every training to be done, what matters the most first; `kept` grows meanwhile by what has been done."""
    for those in ([way for way in ways if way not in OPTIMIZERS], [way for way in ways if way in OPTIMIZERS]):
        for seed in range(seeds):
            for way in those:
                for work in works:
                    length = steps or WORKS[work]
                    done = [each for each in kept if (each["work"], each["way"], each["steps"]) == (work, way, length)]
                    tried = (1.0,) if way not in OPTIMIZERS else (best_rate(done),) if seed else rates
                    yield from (Training(work, way, seed, length, rate) for rate in tried)


def best_rate(kept: list[dict[str, Any]]) -> float:
    """Of the trainings of a work by a way, the rate of the least loss with the first seed."""
    first = [each for each in kept if each["seed"] == 0 and math.isfinite(each["loss"])]
    return float(min(first, key=lambda each: float(each["loss"]))["rate"]) if first else 1.0


def rows(kept: list[dict[str, Any]]) -> list[list[str]]:
    """A row a work and way, at its best rate by the first seed: loss, beside float32's, and bytes, as a factor."""
    table = [["work", "way", "rate", "seeds", "loss", "of float32's", "fewer bytes", "measuring", "aim", "reached"]]
    for work in dict.fromkeys(each["work"] for each in kept):
        best = {}
        for way in dict.fromkeys(each["way"] for each in kept if each["work"] == work):
            ours = [each for each in kept if (each["work"], each["way"]) == (work, way)]
            rate = best_rate(ours)
            best[way] = [each for each in ours if each["rate"] == rate]
        for way, ours in best.items():
            cpu_s = sum(each.get("cpu_s", each["seconds"]) for each in ours)
            spent = [each["noise_s"] for each in ours if "noise_s" in each]
            base = _loss_beside(ours, best.get("none", []))
            table.append([
                work, way, f"{ours[0]['rate']:g}", str(len(ours)),
                f"{statistics.mean(each['loss'] for each in ours):.4f}", "" if base is None else f"{base:.4f}",
                f"{_fewer(ours, ''):.1f}", f"{sum(spent) / cpu_s:.2%}" if spent else "",
                *_beside_aim(AIMS.get((work, way)), ours, best),
            ])  # fmt: skip
    return table


def _beside_aim(aim: Aim | None, ours: list[dict[str, Any]], best: dict[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """An aim in words, and whether it was reached, as far as is known."""
    if aim is None:
        return "", ""
    loss, fewer = _loss_beside(ours, best.get(aim.base, [])), _fewer(ours, "late_" if aim.frozen else "")
    told = f"{aim.loss:g} of {aim.base}, {aim.fewer:g} times fewer{' after freezing' if aim.frozen else ''}"
    if loss is None:
        return told, f"{aim.base} is not there yet; {fewer:.1f}"
    return told, f"{'yes' if loss <= aim.loss and fewer >= aim.fewer else 'no'}: {loss:.4f}, {fewer:.1f}"


def _loss_beside(ours: list[dict[str, Any]], base: list[dict[str, Any]]) -> float | None:
    """The mean loss beside that of `base`, over the seeds that both have."""
    losses, others = ({each["seed"]: each["loss"] for each in some} for some in (ours, base))
    seeds = sorted(losses.keys() & others.keys())
    return statistics.mean(losses[s] for s in seeds) / statistics.mean(others[s] for s in seeds) if seeds else None


def _fewer(ours: list[dict[str, Any]], which: str) -> float:
    def total(name: str) -> float:
        return sum(float(each.get(which + name, each[name])) for each in ours)

    return total("dense_nbytes") / max(1.0, total("sent_nbytes"))


def main(
    works: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WORKS),
    ways: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join((*CODECS, *OPTIMIZERS)),
    seeds: Annotated[int, typer.Option(help="Trainings of each way.")] = 3,
    steps: Annotated[int, typer.Option(help="Of each training; 0 is what each work has.")] = 0,
    short: Annotated[bool, typer.Option(help="One seed, one rate, 60 steps; kept only in --output.")] = False,
    output: Annotated[Path | None, typer.Option(help="The record, which is gone on with.")] = None,
    json: Json = False,
) -> None:
    """Train, or go on training, and show the losses beside the bytes."""
    target = output or (None if short else RESULTS)
    record: dict[str, Any] = (
        texts.loads(target.read_text()) if target is not None and target.exists() else {"trainings": []}
    )
    length, tried = steps or (60 if short else None), (1.0,) if short else RATES
    kept = record["trainings"]
    for training in trainings(works.split(","), ways.split(";"), 1 if short else seeds, length, tried, kept):
        known = [each for each in kept if asdict(training).items() <= each.items()]
        if known:
            continue
        kept.append({**asdict(training), **train(training)})
        record["environment"] = environment()
        if target is not None:
            files.replace(target, texts.dumps(record, indent=1) + "\n")
        last = kept[-1]
        typer.echo(f"{training}: loss {last['loss']:.4f}, {last['sent_nbytes']:,} B", err=True)
    if json:
        return echo_json(record)
    heads, *body = rows(kept)
    echo_table(heads, body, left=["way", "aim", "reached"])


if __name__ == "__main__":
    typer.run(main)
