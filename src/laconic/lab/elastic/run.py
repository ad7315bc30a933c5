"""`laconic train --elastic`: a training that goes on when workers die, from the command's words to its report.

Callers: the command line. The command takes no part in the training: workers agree among themselves
(`laconic.elastic`) and write down what they do (`elastic_training.py`). Here everything unexpected is put into the
record at once, and in the end the trial is made of what was written.
"""

from __future__ import annotations

from pathlib import Path

from laconic.consistency.churn.messages import MAX_MEMBERS
from laconic.consistency.churn.ways import way_for
from laconic.errors import BadInput
from laconic.exchange.policy import flat_codec
from laconic.lab.clusters.launch import is_launched
from laconic.lab.elastic.replacements import Crew
from laconic.lab.elastic.timeline import StartRow, as_interruptions, starts_journal, story
from laconic.lab.elastic.trial import CLOCK, elastic_trial
from laconic.lab.elastic.worker import ElasticPlan, WorkerEnded, steps_journal
from laconic.lab.records import interruptions
from laconic.lab.records.record import Configuration, Record
from laconic.lab.runs import control
from laconic.lab.runs.progress import Progress
from laconic.lab.runs.train import Finished, begin, conclude, new_record, refuse_seed, steps_of, stopping
from laconic.lab.runs.workers import Workers, ruler
from laconic.storage.checkpoints import newest
from laconic.transports.launcher import RankFailed
from laconic.workloads import AS_DECLARED, Changes

OPTION = "elastic"  # of a configuration whose workers may come and go


def train_elastic(
    workload: str,
    workers: int,
    *,
    codec: str = "none",
    algorithm: str = "auto",
    consistency: str = "sync",
    link: str | None = None,
    hosts: int | None = None,
    seed: int = 0,
    changes: Changes = AS_DECLARED,
    tuning_runs: int | None = None,
    runs: Path = Path("runs"),
    command: str = "",
) -> Finished:
    """Train a workload with workers that are replaced when they die.

    Raises:
        BadInput: a name that is not known, or a value that cannot be used.
        RankFailed: workers died again and again, or all of them at once; the sentence says how to go on.
    """
    refuse_seed(seed)
    if is_launched():
        raise BadInput("--elastic starts and replaces its own workers: run it without torchrun or mpiexec")
    if algorithm != "auto":
        raise BadInput("--elastic has its own exchange, by a coordinator: it takes no --algorithm")
    if codec == "auto":
        raise BadInput("--codec auto chooses for all-reduces, which --elastic does not use; name a codec")
    way, coded = str(way_for(consistency, workers)), not flat_codec(codec).exact
    name = " ".join(["elastic workers", *([codec] if coded else []), *([way] if way != "sync" else [])])
    chosen_workload = changes.of(workload)
    with Workers(workers, link, hosts) as place:
        told = {"seed": seed, "bytes": ruler(place.counted_by(workers), "laconic"), OPTION: "lost workers are replaced"}
        chosen = Configuration(name, "laconic", codec, "coordinator", way, workers, "zmq", dict(told))
        record = new_record("train", chosen_workload, workers, [chosen], place, tuning_runs, runs, command)
        record.clock = CLOCK
        _check_size(record, chosen_workload.batch, workers)
        folder = begin(record, runs)
        with control.only_one(folder):
            return _train(folder, record, place)


def _check_size(record: Record, batch: int, workers: int) -> None:
    """Everyone needs a sample of every step: the coordinator too, which tests and writes checkpoints between them."""
    samples = record.workload.train_samples
    smallest = samples // -(-samples // batch)
    if workers > min(smallest, MAX_MEMBERS):
        why = f"a group has at most {MAX_MEMBERS}, and each a sample of every step ({record.workload.name}: {smallest})"
        raise BadInput(f"--elastic takes 1 to {min(smallest, MAX_MEMBERS)} workers here: {why}; got {workers}")


def is_elastic(record: Record) -> bool:
    """Whether a run was begun by `train_elastic`."""
    return any(OPTION in each.options for each in record.configurations)


def resume_elastic(folder: Path, record: Record) -> Finished:
    """Go on with an elastic run from the end of the last epoch of which there is a whole checkpoint."""
    (chosen,) = record.configurations
    hosts = record.link.hosts if record.link.emulated else None
    with control.only_one(folder), Workers(chosen.workers, record.link.spec, hosts) as place:
        step = _saved(folder)
        reached = max((row.step for row in steps_journal(folder).read() if row.start == record.starts), default=0)
        interruptions.note_resumption(record, folder, step, reached)
        record.save(folder)
        return _train(folder, record, place, step)


def _train(folder: Path, record: Record, place: Workers, step: int = 0) -> Finished:
    """Train from `step` on; the record tells how it ended, whatever that is."""
    (chosen,) = record.configurations
    control.forget(folder)
    starts_journal(folder).add(StartRow(record.starts, step))
    plan = ElasticPlan(
        record.workload.name, chosen.codec, chosen.consistency, int(chosen.options["seed"]),
        Changes.recorded(record.workload), chosen.workers, str(folder.absolute()), start=record.starts, resume=step,
        counted_by=place.counted_by(chosen.workers),
    )  # fmt: skip
    steps, label = steps_of(record), f"{plan.workload}, {chosen.name}, {chosen.workers} workers"
    with Progress(folder, label, steps) as progress, stopping(folder):
        crew = Crew(plan, place, lambda: write_down(record, folder), progress.note)
        try:
            with crew:
                ended = crew.run()
        except RankFailed as error:
            write_down(record, folder)
            record.interruptions.append(interruptions.failure(error, crew.step, _saved(folder)))
            conclude(record, folder)
            raise RankFailed(f"{error}; go on with: laconic train --resume {folder}", error.rank) from error
    write_down(record, folder)
    _finish(record, folder, plan, ended, crew.step)
    return Finished(folder, record, crew.step, steps)


def _finish(record: Record, folder: Path, plan: ElasticPlan, ended: list[WorkerEnded], step: int) -> None:
    """Complete the record of a training that came to its end, or was stopped on request."""
    if any(each.digest for each in ended):
        record.trials = [elastic_trial(record, folder, plan.changes.of(plan.workload), ended)]
        record.finished = True
    else:
        record.interruptions.append(interruptions.stopped(step, max(0, step - _saved(folder))))
    conclude(record, folder)


def write_down(record: Record, folder: Path) -> None:
    """Put what has happened to the workers so far into the record, and save it if that is news."""
    ends = [each for each in record.interruptions if each.ended]
    found = sorted([*ends, *as_interruptions(story(folder))], key=lambda each: each.when)
    if found != record.interruptions:
        record.interruptions = found
        record.save(folder)


def _saved(folder: Path) -> int:
    """The newest step that can be gone on from."""
    return newest(folder / "checkpoints", 1) or 0
