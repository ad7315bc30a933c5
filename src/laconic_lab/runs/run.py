"""A run: a folder with its record, from its beginning or resumption to its lint and report.

Callers: `train` and `compare`, which fill it with trials. The folder has everything a resumption needs; it is written
from the first moment on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from laconic.errors import BadInput, StorageError
from laconic.storage.run_folders import make_folder
from laconic.workloads import Changes
from laconic.workloads.order import steps
from laconic_lab.environment import run_environment
from laconic_lab.lint import lint
from laconic_lab.records import interruptions
from laconic_lab.records.record import FILE, Configuration, Record
from laconic_lab.records.summary import make_claims
from laconic_lab.report import write_report
from laconic_lab.runs import stopping
from laconic_lab.runs.elastic.trial import CLOCK as ELASTIC_CLOCK
from laconic_lab.runs.elastic.worker import check_size
from laconic_lab.runs.spec import RunSpec, TrialSpec
from laconic_lab.runs.trainer import CLOCK
from laconic_lab.runs.workers import Workers, how_counted

Kind = Literal["train", "compare"]


class Run:
    """A run that is under way.

    Attributes:
        folder: runs/<id>.
        record: what has come of it so far; `save` writes it.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder, self.record = folder, record

    @classmethod
    def begin(cls, kind: Kind, spec: RunSpec, workers: Workers, configurations: Sequence[Configuration]) -> Run:
        """Save the record of a new run, which `runs`/latest leads to from now on.

        It reads the data: what is missing is fetched, or named, before all else.
        """
        workload = spec.changes.of(spec.workload)
        described = replace(workload.prepare(0).describe(workers.count), target_accuracy=workload.target)
        elastic = any(each.kind == "elastic" for each in configurations)
        if elastic:
            check_size(described, workers.count)
        folder = make_folder(workload.slug, spec.runs)
        record = Record(
            kind=kind,
            id=folder.name,
            created=interruptions.now(),
            command=spec.command,
            workload=described,
            scaling="strong" if workers.count > 1 else "none",
            clock=ELASTIC_CLOCK if elastic else CLOCK,
            environment={**run_environment(), "blas_threads": 1},
            configurations=[_with_options(each, spec, workers) for each in configurations],
            link=workers.setting,
            tuning_runs=spec.tuning_runs,
            seeds=list(spec.seeds),
            slow=spec.slow,
        )
        run = cls(folder, record)
        run.save()
        run._lead_latest_here()
        return run

    @classmethod
    def resume(cls, folder: Path, kind: Kind, workload: str | None = None) -> Run:
        """The run in a folder, which `laconic KIND` can go on with.

        Raises:
            RecordError: there is no such run.
            BadInput: it is finished, of the other kind, or of another workload.
        """
        folder = folder.parent if folder.name == FILE else folder
        # `latest` leads to another run as soon as the next one begins
        folder = folder.parent / folder.readlink() if folder.is_symlink() else folder
        record = Record.load(folder)
        if record.kind != kind:
            what = "training" if record.kind == "train" else "comparison"
            raise BadInput(f"{folder} is a {what}; go on with: laconic {record.kind} --resume {folder}")
        if record.finished:
            raise BadInput(f"{folder} is finished; start another run, or look at {folder / 'report.html'}")
        if workload is not None and workload != record.workload.name:
            raise BadInput(f"{folder} trains {record.workload.name}, not {workload}")
        return cls(folder, record)

    def workers(self) -> Workers:
        """Workers as the run began with."""
        link, counts = self.record.link, [each.workers for each in self.record.configurations]
        hosts = link.hosts if link.emulated else None
        return Workers(max(hosts or 1, *counts), link.spec, hosts, link.between)

    @property
    def steps(self) -> int:
        """Steps of a training; the same for any number of workers, as the batch is divided."""
        described = self.record.workload
        workload, samples = Changes.recorded(described).of(described.name), described.train_samples
        return sum(steps(samples, batch) for batch in workload.batches(samples))

    def trial(self, chosen: Configuration, seed: int) -> TrialSpec:
        """The next trial."""
        record = self.record
        return TrialSpec(
            record.workload.name, chosen, seed, Changes.recorded(record.workload), order=len(record.trials),
            folder=str(self.folder.absolute()), start=record.starts, slow=record.slow,
        )  # fmt: skip

    def save(self) -> None:
        """Write the record as it is now."""
        self.record.save(self.folder)

    def conclude(self) -> None:
        """Save what the run has come to, with its claims, its lint and its report."""
        base = baseline(self.record) if self.record.kind == "compare" else None
        self.record.claims = [] if base is None else make_claims(self.record, base)
        self.record.lint = lint(self.record)
        self.save()
        write_report(self.record, self.folder)
        stopping.forget(self.folder)

    def try_to_conclude(self) -> str:
        """Conclude a failed run; if that cannot be written, keep the record, and return a clause that says so."""
        try:
            self.conclude()
            return ""
        except StorageError as error:
            return f"; nor is this failure in the record: {error}"

    @contextlib.contextmanager
    def says_how_to_go_on(self) -> Iterator[None]:
        """Append the command that resumes the run to a StorageError's message."""
        try:
            yield
        except StorageError as error:
            kept = Record.load(self.folder)
            words = "report" if kept.finished else f"{kept.kind} --resume"  # a finished run lacks no more than that
            cure = f"when there is room again, go on with: laconic {words} {self.folder}"
            raise StorageError(f"{error}; {cure}", error.errno) from error

    def _lead_latest_here(self) -> None:
        link = self.folder.parent / f".latest-{os.getpid()}"
        with contextlib.suppress(OSError):  # a convenience, which not every file system has
            link.symlink_to(self.record.id)
            link.replace(self.folder.parent / "latest")


def baseline(record: Record) -> str | None:
    """The baseline: the first peer that trained, or else the first configuration that did."""
    trained = [c for c in record.configurations if record.trials_of(c.name)]
    peers = [c.name for c in trained if c.kind == "peer"]
    return next(iter([*peers, *(c.name for c in trained)]), None)


def _with_options(chosen: Configuration, spec: RunSpec, workers: Workers) -> Configuration:
    """The configuration with what a reader should know beside it."""
    options = {**chosen.options, "bytes": how_counted(workers.counted_by(chosen.workers), chosen)}
    if chosen.kind == "elastic":
        options["elastic"] = "lost workers are replaced"
    if spec.slow > 1:
        options["slow_worker"] = f"rank {chosen.workers - 1} computes {spec.slow:g} times as long"
    return replace(chosen, options=options)
