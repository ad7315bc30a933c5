"""A training that is killed again and again: a nursery forks it, so that imports are paid once, and kills it.

    python checkpoint_lives.py FOLDER LIVES SEED

Half the lives end by SIGKILL after a random time, from outside; the other half by SIGKILL in the midst of a random
operation of a write: after so many bytes, before or after an fsync, a rename or a removal. Every life tells in
FOLDER/log: `resumed STEP DIGEST`, `step STEP ROWS DIGEST` and, when a checkpoint is known to be written, `saved STEP`.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.exchange.checkpoints import Checkpoints, Cursor
from laconic.storage import tree
from laconic.transports.threads import Hub, ThreadTransport
from laconic.transports.world import World

SAMPLES, BATCH = 40, 6
OPERATIONS = 200  # of these one is chosen; a checkpoint takes about 60


class Life:
    """A model, its optimiser, its data and its random numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.2), nn.Linear(12, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.world = World(ThreadTransport(Hub(1), 0))
        self.cursor = Cursor(SAMPLES, batch=BATCH, world=self.world)
        self.x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))

    def step(self) -> Tensor:
        """Train on the next rows, with dropout; returns them."""
        rows = next(self.cursor)
        self.optimizer.zero_grad()
        self.model(self.x[rows]).square().mean().backward()
        self.optimizer.step()
        return rows

    def digest(self) -> str:
        """Of the weights and of what the random generator will say."""
        parts = [p.detach().numpy().tobytes() for p in self.model.parameters()]
        return hashlib.sha256(b"".join([*parts, torch.get_rng_state().numpy().tobytes()])).hexdigest()[:16]


def live(folder: Path, ready: int) -> None:
    """Resume, tell it through `ready`, and train until killed, with a checkpoint after every step."""
    life = Life()
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill leaves no damaged file
        checkpoints = Checkpoints(folder / "kept", world=life.world)
        found = checkpoints.restore(model=life.model, optimizer=life.optimizer, cursor=life.cursor)
    step = 0 if found is None else found.step
    os.write(log, f"resumed {step} {life.digest()}\n".encode())
    os.write(ready, b"!")
    while True:
        rows = life.step()
        step += 1
        text = "-".join(map(str, rows.tolist()))
        os.write(log, f"step {step} {text} {life.digest()}\n".encode())
        checkpoints.save(step, model=life.model, optimizer=life.optimizer, cursor=life.cursor)
        if step % 3 == 0:
            checkpoints.wait()
            os.write(log, f"saved {step}\n".encode())


def die_at(operation: int) -> None:
    """End this process by SIGKILL at the n-th operation on files: in a write, around an fsync, rename or removal."""
    left = [operation]

    def counted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            _tick(left)
            found = inner(*args, **options)
            _tick(left)
            return found

        return call

    for name in ("fsync", "replace", "chmod"):
        setattr(os, name, counted(getattr(os, name)))
    Path.unlink = counted(Path.unlink)  # type: ignore[method-assign]
    whole = tree.dump

    def dump(value: Any, file: Any) -> None:
        whole(value, _Torn(file, left))

    tree.dump = dump


class _Torn:
    """A file whose writes reach the disk in two halves, between which the process may die."""

    def __init__(self, file: Any, left: list[int]) -> None:
        self.file, self.left, self.tell, self.seek = file, left, file.tell, file.seek

    def write(self, data: bytes) -> None:
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.file.write(half)
            self.file.flush()
            _tick(self.left)


def _tick(left: list[int]) -> None:
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, lives: int, seed: int) -> None:
    """Fork and kill `lives` times."""
    torch.set_num_threads(1)
    Life().step()  # what torch imports at its first step is paid once
    chance = random.Random(seed)
    gc.freeze()
    for number in range(lives):
        operation, delay_s, early = chance.randrange(1, OPERATIONS), chance.uniform(0, 0.03), chance.random() < 0.1
        hears, tells = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if number % 2:
                    die_at(operation)
                live(folder, tells)
            finally:
                os._exit(1)  # never back into the nursery
        os.close(tells)
        if number % 2 == 0:
            if not early:
                os.read(hears, 1)  # it has resumed
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(hears)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"life {number} ended by itself: {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
