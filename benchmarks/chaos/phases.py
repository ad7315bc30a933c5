"""The phases of a training at which a fault can be injected: a table of names, and how each of them is noticed.

Caller: `program.py`, in the process of the rank that has a trap. What happens in a user's own code says so itself
(`notes.at("forward")` in `loop.py` and the doors). What happens inside of Laconic, torch or the system is noticed by
wrapping the function of that name in this one process, so that the library holds nothing that only serves tests. To add
a phase, name it here and wrap a function, or call `notes.at` in a door.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import laconic
from benchmarks.chaos.task import Notes
from benchmarks.fuzz.fuzz_codecs import Fuzzer
from laconic import codecs
from laconic.codecs import Codec
from laconic.codecs.frame import HEADER_NBYTES
from laconic.transports.base import Transport

# In a user's own code: before the door is called, around the step, in evaluation, and about to finish and to close.
OWN = ("start", "batch", "forward", "backward", "evaluation", "finish", "close")
USER = ("start", "batch", "forward", "backward", "evaluation", "optimiser")  # where a user's code may raise
ENGINE_FILES = {"gloo": "torchdist", "mpi": "mpi", "threads": "threads"}
_FILES = (".ckpt", ".lac")


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _wrap(home: Any, name: str, notes: Notes, phase: str, *, after: bool = False) -> None:
    inner: Callable[..., Any] = getattr(home, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **named: Any) -> Any:
        if not after:
            notes.at(phase)
        found = inner(*args, **named)
        if after and notes.at(phase):
            forge(found, notes)
        return found

    setattr(home, name, wrapped)


def _coders(notes: Notes, phase: str, *names: str, after: bool = False) -> None:
    codecs.names()  # imports them
    for kind in _subclasses(Codec):
        for name in names:
            if name in vars(kind):
                _wrap(kind, name, notes, phase, after=after)


def _encode(notes: Notes) -> None:
    """A payload has just been made, and nothing of it is sent."""
    _coders(notes, "encode", "encode", "encode_feedback", "encode_selection", after=True)


def _decode(notes: Notes) -> None:
    """A payload has come, and is about to be read."""
    _coders(notes, "decode", "decode", "decode_add", "decode_mean", "decode_sparse")


def _wire(notes: Notes) -> None:
    """A message has just been handed to the engine."""
    engine = ENGINE_FILES.get(notes.task.engine, "zeromq")
    for name in ("zeromq", engine):  # imported on first use; modes have a mesh of ZeroMQ beside every engine
        importlib.import_module(f"laconic.transports.{name}")
    _ = laconic.elastic  # which has an engine of its own
    for kind in _subclasses(Transport):
        for name in ("post", "send_to"):
            if name in vars(kind):
                _wrap(kind, name, notes, "wire", after=True)


def _optimiser(notes: Notes) -> None:
    """Some weights are about to be updated: all of them, or those of a bucket whose mean is there."""
    _wrap(importlib.import_module("torch.optim.sgd"), "sgd", notes, "optimiser")


def _checkpoint(notes: Notes) -> None:
    """A checkpoint or a model's file is written, under a name that nobody reads yet."""
    inner = os.replace

    def replace(source: Any, target: Any, **named: Any) -> None:
        if Path(target).suffix in _FILES:
            notes.at("checkpoint")
        inner(source, target, **named)

    os.replace = replace  # type: ignore[assignment]


def _journal(notes: Notes) -> None:
    """A line of a search's journal is written, and perhaps not yet on the disk."""
    _wrap(os, "fsync", notes, "journal")


WRAPPED: dict[str, Callable[[Notes], None]] = {
    "encode": _encode, "wire": _wire, "decode": _decode, "optimiser": _optimiser, "checkpoint": _checkpoint,
    "journal": _journal,
}  # fmt: skip
TRAINING = (*OWN[:4], "encode", "wire", "decode", "optimiser", *OWN[4:], "checkpoint")


def install(notes: Notes) -> None:
    """Wrap what the phase of this rank's trap is noticed by."""
    trap = notes.task.trap
    if trap is not None and trap.rank == notes.rank and trap.phase in WRAPPED:
        WRAPPED[trap.phase](notes)


def forge(payload: torch.Tensor, notes: Notes) -> None:
    """Change a payload's body in place, under a checksum computed anew."""
    assert notes.task.trap is not None
    chance, array = random.Random(notes.task.trap.seed), payload.numpy()
    whole = array.tobytes()
    body = bytearray(whole[HEADER_NBYTES:])
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(body))
        body[at : at + 4] = chance.choice([b"\xff" * 4, b"\x00" * 4, chance.randbytes(4)])[: len(body) - at]
    numel = int.from_bytes(whole[4:12], "little")
    sealed = Fuzzer._sealed(whole, chance.choice([numel, numel, numel + 1, 1 << 40]), bytes(body))
    array[:] = memoryview(sealed).cast("B")
