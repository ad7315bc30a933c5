"""Show a training's progress: a bar on a terminal, otherwise one line per evaluation.

Callers: `train` and `compare`. It reads what rank 0 appends to metrics.jsonl, so that nothing in the training waits for
a terminal.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from laconic import words
from laconic.storage.json_text import parse_lines
from laconic_lab.records import metrics

_EVERY_S = 0.2
_SILENCE_S = 5.0  # after which a line says what is being waited for
_PREPARING = "preparing, before the clock starts: connections, and kernels that the cache does not have"


class Progress:
    """The progress of one trial of so many steps, while the block lasts.

    `lines`: whether evaluations are printed where there is no terminal.
    """

    def __init__(self, folder: Path, label: str, steps: int, *, lines: bool = True) -> None:
        self._path = folder / metrics.FILE
        self._at = self._path.stat().st_size if self._path.exists() else 0
        self._label, self._lines = label, lines
        self._scores = ""
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        if self._console.is_terminal:
            shown = TextColumn("{task.description}"), TextColumn("{task.fields[now]}")
            columns = (shown[0], BarColumn(), MofNCompleteColumn(), shown[1], TimeRemainingColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(label, total=steps, now=_PREPARING)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="laconic-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def note(self, line: str) -> None:
        """Print a sentence without disturbing the bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            say(line)

    def _follow(self) -> None:
        began, begin = self._at, time.monotonic()
        is_silent = self._bar is None and self._lines
        while True:
            last = self._ended.wait(_EVERY_S)
            self._read()
            if is_silent and (self._at > began or time.monotonic() - begin > _SILENCE_S):
                if self._at == began:
                    say(f"{self._label}: {_PREPARING}")
                is_silent = False
            if last:
                return

    def _read(self) -> None:
        """Show every whole line that is new."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in parse_lines(whole):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that says something else
                self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        tested = "test_loss" in line
        if tested:
            accuracy = line["test_accuracy"]
            loss = f"loss {line['test_loss']:.4f}"
            self._scores = f"test {loss if accuracy is None else words.percent(accuracy)}"
        speed = f"{line['samples_per_s']:,.0f} samples/s, {words.nbytes(line['sent_Bps'])}/s"
        now = ", ".join(part for part in (f"loss {line['train_loss']:.4f}", self._scores, speed) if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], now=now)
        elif tested and self._lines:
            say(f"{self._label}: step {line['step']}, {now}")


def say(line: str) -> None:
    """Print a sentence on standard error: standard output is for the result."""
    sys.stderr.write(words.plain(line) + "\n")
    sys.stderr.flush()
