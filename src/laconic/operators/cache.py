"""What was measured on this machine, kept on disk: a JSON file for each processor, instruction set, threads and torch.

Callers: the tuner, the planner. A measurement is only true where it was made, so the file's name and head say where; an
entry that is foreign, of another form or corrupt counts as absent and is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from laconic.errors import LaconicError
from laconic.storage import files, json_text

log = logging.getLogger("laconic.operators")
FORMAT = 3  # raised when methods change so much that old times mislead


def machine() -> dict[str, Any]:
    """What the times depend on beside the shapes."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "format": FORMAT,
    }


class Cache:
    """Entries by key, for this machine.

    Args:
        folder: where the files are; None keeps nothing.
        kind: whose entries they are, the first part of the file's name.
    """

    def __init__(self, folder: Path | None, kind: str = "operators") -> None:
        self.machine = machine()
        name = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{kind}-{name}.json"
        self.entries = self._read()
        self.changed = False

    def get(self, key: str, valid: Callable[[Any], bool]) -> Any:
        """The entry, or None where there is none that is valid."""
        found = self.entries.get(key)
        if found is None:
            return None
        try:
            good = valid(found)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, LaconicError):
            good = False
        if not good:
            log.warning("an entry of %s cannot be used and is measured again: %s", self.path, key)
        return found if good else None

    def put(self, key: str, entry: Any) -> None:
        """Remember an entry; `save` writes it."""
        self.entries[key] = entry
        self.changed = True

    def save(self) -> None:
        """Write what is new beside what others wrote meanwhile; a folder that cannot be written is only logged."""
        if self.path is None or not self.changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": self.machine, "entries": {**self._read(), **self.entries}}, indent=1)
            files.replace(self.path, text)
        except OSError as error:
            log.warning("what was measured is not kept: %s", error)

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            found = json_text.parse(self.path.read_bytes())
            entries = found["entries"] if found["machine"] == self.machine else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, LaconicError) as error:
            log.warning("%s cannot be read and is made anew: %s", self.path, error)
            return {}
        return entries if isinstance(entries, dict) else {}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "cpu family", "model\t", "stepping")
    found = [line.partition(":")[2].strip() for line in lines if line.startswith(wanted)]
    return " ".join(found[:4]) or platform.machine()
