"""The workers of a soak: what each of them trains and writes, and who is there.

Caller: `soak.py`. The weights count the samples: there is one parameter a sample, whose gradient is one where the
sample is in the batch, so that after every epoch each of them must be the number of epochs. A lost sample shows as one
less, a doubled one as one more, whatever the ledgers say. That holds where workers agree on means by samples, of
gradients or of weights: not with a momentum of blocks, nor by a robust rule (`counts`).
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import laconic
from laconic.consistency.elastic.door import way_for
from laconic.consistency.modes.local import BlockMomentum
from laconic.consistency.modes.robust import Robust

SAMPLES, BATCH = 2048, 32
LONGEST_GAP_S = 5.0
# What a worker would spend seconds on importing: once, in the fork server.
PRELOAD = ["laconic.warm", "laconic.consistency.elastic.door", "benchmarks.soak.workers"]


def counts(options: dict[str, Any]) -> bool:
    """Whether the weights count the samples under these options of `laconic.elastic`."""
    way = way_for(options.get("consistency", "sync"))
    return not isinstance(way, Robust) and not (isinstance(way, BlockMomentum) and way.momentum != 0)


def period(options: dict[str, Any]) -> int:
    """Steps between two commits."""
    return int(getattr(way_for(options.get("consistency", "sync")), "period", 1))


class Counting(nn.Module):
    """A small network, and one number a sample that counts how often the sample was used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.uses = nn.Parameter(torch.zeros(SAMPLES))
        self.network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))


def work(folder: str, name: str, workers: int, options: dict[str, Any]) -> None:
    """Train until told to leave by SIGTERM; a line of JSON after every committed step.

    Args:
        options: of `laconic.elastic`.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the fork server, even when stopped
    torch.set_num_threads(1)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    model, counted = Counting(), counts(options)
    groups = [{"params": [model.uses], "lr": float(BATCH), "momentum": 0.0}, {"params": model.network.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 32, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)
    with open(Path(folder, "logs", name), "w", buffering=1) as log:
        print(json.dumps({"ready": time.monotonic()}), file=log)
        job = laconic.elastic(
            model, optimizer, laconic.Samples(SAMPLES, BATCH, epochs=10**6), Path(folder, "meeting"),
            workers=workers, **({"codec": "none"} | options),
        )  # fmt: skip
        with job:
            for batch in job.batches():
                epoch, steps = job.epoch, job.steps
                loss = nn.functional.cross_entropy(model.network(x[batch]), y[batch]) - model.uses[batch].mean()
                loss.backward()
                if job.step() and job.steps != steps:
                    line: dict[str, Any] = {"t": time.monotonic(), "step": job.steps, "view": job.view}
                    line |= {"id": job.worker, "members": job.members, "digest": job.digest}
                    if job.epoch != epoch and counted:
                        wrong = (model.uses.detach() - job.epoch).abs().max().item()
                        line |= {"epoch": job.epoch, "wrong": wrong}
                    print(json.dumps(line), file=log)
                if told:
                    break


# the party


@dataclass
class Worker:
    """A process, and what it has written so far."""

    name: str
    process: Any
    log: Path
    started: float
    offset: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    ready: float | None = None
    first: dict[str, Any] | None = None


class Party:
    """All workers of a soak, and everything they report."""

    def __init__(self, folder: Path, size: int, options: dict[str, Any]) -> None:
        self.folder, self.size, self.options = folder, size, options
        (folder / "logs").mkdir(parents=True)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.workers: list[Worker] = []
        self.gone: list[Worker] = []
        self.commits: dict[int, tuple[float, int]] = {}  # step → when first seen committed, and in which view
        self.digests: dict[int, dict[int, set[str]]] = {}  # step → checksum → who reported it
        self.killed_together: list[set[str]] = []
        self.epochs: dict[int, float] = {}
        self.problems: list[str] = []
        self.newest: dict[str, Any] = {}
        self.joins: list[float] = []
        self.usage: list[dict[str, int]] = []
        self._started = 0

    def start(self) -> Worker:
        """One worker more."""
        self._started += 1
        name = f"worker{self._started}"
        about = (str(self.folder), name, self.size, self.options)
        process = self.context.Process(target=work, args=about, daemon=True)
        process.start()
        worker = Worker(name, process, self.folder / "logs" / name, time.monotonic())
        self.workers.append(worker)
        return worker

    def look(self) -> None:
        """Take in what the workers have written."""
        for worker in self.workers:
            self._read(worker)

    def _read(self, worker: Worker) -> None:
        if not worker.log.exists():
            return
        with open(worker.log, "rb") as file:
            file.seek(worker.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        worker.offset += len(whole)
        for text in whole.splitlines():
            line = json.loads(text)
            if "ready" in line:
                worker.ready = line["ready"]
            else:
                self._note(worker, line)

    def _note(self, worker: Worker, line: dict[str, Any]) -> None:
        step = line["step"]
        if worker.first is None and worker.ready is not None:
            worker.first = line
            self.joins.append(line["t"] - worker.ready)
        worker.last = line
        self.digests.setdefault(step, {}).setdefault(line["digest"], set()).add(worker.name)
        when, view = self.commits.get(step, (line["t"], line["view"]))
        self.commits[step] = (min(when, line["t"]), max(view, line["view"]))
        if "wrong" in line:
            self.epochs[line["epoch"]] = max(line["wrong"], self.epochs.get(line["epoch"], 0.0))
        if (line["view"], step) > (self.newest.get("view", 0), self.newest.get("step", 0)):
            self.newest = line

    def until(self, done: Callable[[], bool], what: str, limit_s: float = LONGEST_GAP_S) -> bool:
        """Look until `done()`; a problem when that takes too long."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                self.problems.append(f"not within {limit_s:g} s: {what}")
                return False
            self.look()
            time.sleep(0.004)
        return True

    @property
    def coordinator(self) -> Worker | None:
        """The worker that coordinates the newest view, as far as it has written."""
        first = self.newest.get("members", [0])[0]
        return next((w for w in self.workers if w.last.get("id") == first), None)

    @property
    def trained(self) -> list[Worker]:
        """The living workers that have made a step."""
        return [w for w in self.workers if w.last and w.process.is_alive()]

    def remove(self, worker: Worker) -> None:
        """Take in the last words of a worker that is gone."""
        worker.process.join(timeout=5)
        self._read(worker)
        self.workers.remove(worker)
        self.gone.append(worker)
        worker.process.close()

    def close(self) -> None:
        """End every worker, the stopped ones too."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join(timeout=5)
