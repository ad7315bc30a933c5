"""Does training on P workers give what one process gives, and send what it should? Deep500's fourth level.

Every rank trains the same few steps of `digits-mlp` (neither dropout nor batch normalisation) with each exchange of the
gradient, and by itself on the whole batch: the sequential oracle. All begin with the same weights and see the same
samples at each step.

Two things are checked. Without a codec, the weights must be as near to an oracle in float64 as the sequential training
in float32 is, up to a small factor: the order of additions is all that differs. And the bytes that the transport
counted on each rank must equal those predicted: by the schedule where nothing is encoded, by the codec's declared size
and the form of its messages where it has one of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from laconic import schedules
from laconic.cli.shared import Engine, Json, Ranks, count_option, echo_json, echo_table
from laconic.codecs import Codec, codec
from laconic.exchange import coded, costs
from laconic.exchange.collectives import all_gather, all_reduce
from laconic.schedules.schedule import bounds
from laconic.transports.world import World, init
from laconic.workloads import Task, get
from laconic_lab.clusters.launch import run_job

WORKLOAD = "digits-mlp"
CODECS = ("dynamic8", "linear8", "onebit")
# How many times farther from float64 another order of additions may end; 1.01 to 1.02 with 3 workers after 20 steps.
FACTOR = 8.0
Exchange = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Row:
    """One way of exchanging.

    Attributes:
        error: ‖w − w₆₄‖ / ‖w₆₄‖ of the weights after all steps, w₆₄ being the float64 oracle's.
        counted_nbytes: sent by each rank in all steps, as its transport counted.
        predicted_nbytes: the same by formula; None for the engine's own all-reduce, which is not counted.
        replicas_identical: whether all ranks end with the same bits.
    """

    codec: str
    algorithm: str
    error: float
    counted_nbytes: list[int] | None
    predicted_nbytes: list[int] | None
    replicas_identical: bool


def measure(steps: int, seed: int) -> dict[str, Any]:
    """Join the job and check every exchange: the record that `python -m benchmarks distributed --json` prints."""
    with init() as world:
        torch.set_num_threads(1)
        task = get(WORKLOAD).prepare(seed)
        oracle = _sequential(task, steps, torch.float64)
        sequential_error = _distance(_sequential(task, steps, torch.float32), oracle)
        rows = [_check(world, task, steps, "none", name, oracle) for name in costs.candidates(world)]
        rows += [_check(world, task, steps, spec, form, oracle) for spec in CODECS for form in ("gather", "direct")]
        return {
            "workload": WORKLOAD,
            "engine": world.engine,
            "world_size": world.world_size,
            "steps": steps,
            "sequential_error": sequential_error,
            "factor": FACTOR,
            "results": [{**asdict(row), "passed": passed(row, sequential_error)} for row in rows],
        }


def passed(row: Row, sequential_error: float) -> bool:
    """Whether a row holds: replicas and bytes always, nearness to the oracle where nothing is rounded away."""
    near = row.codec != "none" or row.error <= FACTOR * sequential_error
    return near and row.replicas_identical and row.counted_nbytes == row.predicted_nbytes


def predicted(spec: str, algorithm: str, world_size: int, rank: int, numel: int) -> int | None:
    """Bytes that a rank sends in one all-reduce of `numel` float32 values.

    Without a codec 4 bytes for each value that the schedule has it send. With one of fixed size, messages of a head and
    a payload: gather sends the whole to P − 1 peers; direct sends each peer its chunk, then its own chunk's sum to all.

    >>> predicted("none", "ring", world_size=4, rank=0, numel=1000)
    6000
    """
    if algorithm == costs.NATIVE:
        return None
    if spec == "none":
        schedule = schedules.build("all_reduce", algorithm, world_size, numel)
        return 4 * int(schedule.sent_numel_by_rank()[rank])
    chosen = codec(spec)
    if algorithm == "gather":
        return (world_size - 1) * _message_nbytes(chosen, numel)
    edges = bounds(numel, world_size).tolist()
    chunks = [_message_nbytes(chosen, stop - start) for start, stop in pairwise(edges)]
    return sum(chunks) - chunks[rank] + (world_size - 1) * chunks[rank]


def _message_nbytes(chosen: Codec, numel: int) -> int:
    return coded.max_nbytes([chosen.max_nbytes(numel)])


def _check(world: World, task: Task, steps: int, spec: str, algorithm: str, oracle: Tensor) -> Row:
    model = task.workload.build(task.seed)
    coder = None if spec == "none" else spec
    counters = world.transport.counters
    before = counters.total_sent_nbytes

    def exchange(gradient: Tensor) -> None:
        all_reduce(gradient, "mean", codec=coder, algorithm=algorithm, group=world)

    _train(task, model, steps, (world.rank, world.world_size), exchange)
    sent = counters.total_sent_nbytes - before
    weights = _flat(model)
    everyone = all_gather(weights.view(torch.int32), group=world)
    expected = predicted(spec, algorithm, world.world_size, world.rank, weights.numel())
    both = all_gather(torch.tensor([sent, steps * (expected or 0)]), group=world)
    known = expected is not None
    counted, predicted_ = (both[:, column].tolist() if known else None for column in (0, 1))
    same = bool((everyone == everyone[0]).all())
    return Row(spec, algorithm, _distance(weights, oracle), counted, predicted_, same)


def _sequential(task: Task, steps: int, dtype: torch.dtype) -> Tensor:
    """The weights after training alone, on whole batches."""
    model = task.workload.build(task.seed).to(dtype)
    _train(task, model, steps, (0, 1), lambda gradient: None)
    return _flat(model)


def _train(task: Task, model: nn.Module, steps: int, place: tuple[int, int], exchange: Exchange) -> None:
    """Train `model` in place; `exchange` averages a flat gradient over the ranks."""
    optimizer = task.optimizer(model.parameters())
    parameters = list(model.parameters())
    for number in range(steps):
        when = divmod(number, task.steps_per_epoch(place[1]))
        task.begin_step(optimizer, *when, *place)
        batch = task.batch(*when, *place)
        optimizer.zero_grad()
        task.loss(model, batch._replace(x=batch.x.to(parameters[0].dtype))).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        exchange(gradient)
        parts = torch.split(gradient, [p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.reshape(parameter.shape)
        optimizer.step()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _distance(weights: Tensor, oracle: Tensor) -> float:
    return float((weights.double() - oracle).norm() / oracle.norm())


def main(
    ranks: Ranks = 4,
    engine: Engine = None,
    steps: Annotated[int, count_option("Steps of training for each exchange.")] = 10,
    seed: Annotated[int, count_option("Of weights and data order.", least=0)] = 0,
    json: Json = False,
) -> None:
    """Train on N ranks by every exchange; compare weights with one process alone, and bytes with those predicted."""
    record = run_job(ranks, engine, measure, (steps, seed), timeout_s=600)
    if record is None:
        return
    if json:
        echo_json(record)
    else:
        unit = record["sequential_error"]
        typer.echo(
            f"{record['workload']}, {record['steps']} steps, {record['world_size']} ranks on {record['engine']}; "
            f"one process in float32 ends {unit:.1e} from float64, relatively"
        )
        headings = ["codec", "algorithm", "times as far", "sent by a rank", "predicted", "replicas"]
        echo_table(headings, [_distributed_cells(row, unit) for row in record["results"]], left=["algorithm"])
    if not all(row["passed"] for row in record["results"]):
        raise typer.Exit(1)


def _distributed_cells(row: dict[str, Any], unit: float) -> list[str]:
    """Distances are in units of what float32 costs a single process."""
    counted, expected = row["counted_nbytes"], row["predicted_nbytes"]
    sent = "not counted" if counted is None else f"{max(counted):,} B"
    told = "" if expected is None else ("the same" if counted == expected else f"{max(expected):,} B")
    same = "identical" if row["replicas_identical"] else "DIFFER"
    end = same if row["passed"] else f"{same}  FAILS"
    return [row["codec"], row["algorithm"], f"{row['error'] / unit:.3g}", sent, told, end]
