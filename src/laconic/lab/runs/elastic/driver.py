"""`laconic train --elastic`: a training that goes on when workers die.

Callers: `train`. The command takes no part in the training: workers agree among themselves (`laconic.elastic`) and
write down what they do (`journals.py`). Here everything unexpected is put into the record at once, and in the end the
trial is made of what was written.
"""

from __future__ import annotations

from laconic.lab.records.record import Record
from laconic.lab.runs.elastic.journals import Journals, StartRow
from laconic.lab.runs.elastic.pool import WorkerPool
from laconic.lab.runs.elastic.timeline import as_interruptions, losses
from laconic.lab.runs.elastic.trial import elastic_trial
from laconic.lab.runs.progress import Progress
from laconic.lab.runs.run import Run
from laconic.lab.runs.spec import TrialSpec
from laconic.lab.runs.trainer import Ended
from laconic.lab.runs.workers import Workers
from laconic.storage.checkpoints import newest


class Elastic:
    """Workers that are replaced when they die."""

    def __init__(self, run: Run, workers: Workers) -> None:
        self._run, self._workers = run, workers
        self._journals = Journals(run.folder)

    def saved(self) -> int:
        """The newest step that can be gone on from: the end of an epoch."""
        return newest(self._run.folder / "checkpoints", 1) or 0

    def reached(self) -> int:
        """The last step that a worker of this start has written down."""
        rows = self._journals.steps.read()
        return max((row.step for row in rows if row.start == self._run.record.starts), default=0)

    def train(self, trial: TrialSpec, progress: Progress) -> Ended:
        """Train from the trial's checkpoint on; see `Driver`."""
        self._journals.starts.add(StartRow(trial.start, trial.resume))
        trial = self._workers.told(trial)
        try:
            with WorkerPool(trial, self._workers, self.write_down, progress.note) as pool:
                ended = pool.run()
        finally:
            self.write_down()
        if not any(each.digest for each in ended):
            return Ended(pool.step)
        workload = trial.changes.of(trial.workload)
        return Ended(pool.step, elastic_trial(self._run.record, trial, workload, ended))

    def write_down(self) -> None:
        """Put what has happened to the workers so far into the record, and save it if that is news."""
        record: Record = self._run.record
        ends = [each for each in record.interruptions if each.ended]
        found = sorted([*ends, *as_interruptions(losses(self._journals))], key=lambda each: each.when)
        if found != record.interruptions:
            record.interruptions = found
            self._run.save()
