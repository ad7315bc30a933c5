"""The ways to train that each script is run by, and what is kept of a run to compare them.

A script is a function of a `Run`. Where a user would add Laconic's line it calls `run.join(ddp, optimizer)`, and
`run.step(loss)` after each of its steps; nothing else in it knows which way it is trained.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.exchange.job import Job

# name: the door, its codec, and options
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("", "", {}),
    "compress none": ("compress", "none", {}),
    "compress dynamic8": ("compress", "dynamic8", {}),
    "distribute none": ("distribute", "none", {}),
    "distribute none, plain": ("distribute", "none", {"overlap": False}),
    "distribute dynamic8": ("distribute", "dynamic8", {}),
    "distribute dynamic8, plain": ("distribute", "dynamic8", {"overlap": False}),
}
LAUNCH: dict[str, str] = {"TOKENIZERS_PARALLELISM": "false"}


@dataclass
class Run:
    """One training of a script on this rank.

    Attributes:
        losses: by step.
        begun: what this process had written to its sockets before the first step, whoever wrote it.
    """

    way: str
    jobs: list[Job] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    begun: int = 0
    _models: list[nn.Module] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def batch(self, step: int, *shape: int) -> Tensor:
        """Random numbers that are this rank's own."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + self.rank))

    def tokens(self, step: int, *shape: int, below: int = 32) -> Tensor:
        """Random tokens that are this rank's own."""
        return torch.randint(below, shape, generator=torch.Generator().manual_seed(100 * step + self.rank))

    def join(self, model: nn.Module, optimizer: Any) -> Job | None:
        """The line that a user adds."""
        door, codec, options = WAYS[self.way]
        self._models.append(model)
        job: Job | None = None
        if door == "compress":
            job = laconic.compress(model, codec)
        elif door == "distribute":
            job = laconic.distribute(model, optimizer, codec=codec, **options)
        if job is not None:
            self.jobs.append(job)
        self.begun = written_nbytes()
        return job

    def step(self, loss: Tensor | float) -> None:
        """A step has ended."""
        self.losses.append(float(loss))

    def end(self) -> dict[str, Any]:
        """What is left of the training, once all ranks are here."""
        for job in self.jobs:
            job.finish()
        inner = [getattr(model, "module", model) for model in self._models]
        found = {
            "losses": self.losses,
            "nbytes": written_nbytes() - self.begun,  # by Laconic, and by DDP itself
            "values": sum(p.numel() for model in inner for p in model.parameters() if p.requires_grad),
            "weights": digest(p for model in inner for p in model.parameters()),
            "buffers": digest(b for model in inner for b in model.buffers()),
            "explained": [job.explain() for job in self.jobs],
        }
        for job in self.jobs:
            job.close()
        return found


def written_nbytes() -> int:
    """What this process has written so far; gloo writes to its sockets by writev, which counts."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def digest(tensors: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        whole.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def train(script: Callable[[Run], None], ways: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """On a rank: train a script in each of these ways."""
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # what is written is to be what is sent
    dist.init_process_group("gloo")
    found = {}
    for way in ways:
        torch.manual_seed(0)
        run = Run(way)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            script(run)
            found[way] = run.end()
        found[way]["warnings"] = [str(each.message) for each in caught]
    laconic.init().close()
    dist.destroy_process_group()
    return found
