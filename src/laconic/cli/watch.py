"""`laconic watch`: show the metrics that a running script writes as JSON lines, live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, echo_json
from laconic.errors import BadInput, PayloadError
from laconic.storage.json_text import parse

AGAIN_S = 0.5
BARS = "▁▂▃▄▅▆▇█"
WIDE = 40  # values of a sparkline


def watch(
    run: Annotated[Path, typer.Argument(help="A file of JSON lines, or a folder with such files (*.jsonl).")],
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    json: Json = False,
) -> None:
    """Show a script's metrics live in the terminal: last value, median and history."""
    followed = Followed(run)
    followed.read()
    if json:
        return echo_json(followed.summary())
    from rich.console import Console
    from rich.live import Live

    if once:
        return Console().print(_table(followed))
    with Live(_table(followed), refresh_per_second=4) as live:
        while True:
            time.sleep(AGAIN_S)
            if followed.read():
                live.update(_table(followed))
    return None


class Followed:
    """Files of JSON lines that somebody else appends to; only whole lines are read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "run.jsonl"
    >>> _ = file.write_text('{"step": 1, "loss": 2.5}\\n{"step": 2, "lo')
    >>> followed = Followed(file)
    >>> followed.read(), followed.summary()
    (1, {'lines': 1, 'last': {'step': 1, 'loss': 2.5}})
    """

    def __init__(self, run: Path) -> None:
        if not run.exists():
            raise BadInput(f"there is no {run}; a script writes one by laconic.integrations.loggers.JsonLines('{run}')")
        self.run, self.lines, self.bad = run, 0, 0
        self.last: dict[str, Any] = {}
        self.history: dict[str, list[float]] = {}
        self._places: dict[Path, int] = {}

    def read(self) -> int:
        """Read what was added since; returns how many lines."""
        before = self.lines
        for path in sorted(self.run.glob("*.jsonl")) if self.run.is_dir() else [self.run]:
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(line)
        return self.lines - before

    def _take(self, line: bytes) -> None:
        try:
            found = parse(line.decode())
        except (PayloadError, UnicodeDecodeError):
            found = None
        if not isinstance(found, dict):
            self.bad += 1
            return
        self.lines += 1
        self.last.update(found)
        for name, value in found.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.history.setdefault(name, []).append(float(value))
                del self.history[name][: -10 * WIDE]

    def summary(self) -> dict[str, Any]:
        """The number of lines and the last value of each name."""
        return {"lines": self.lines, **({"unreadable": self.bad} if self.bad else {}), "last": self.last}


def _table(followed: Followed) -> Any:
    from rich.table import Table

    last = followed.last
    ago = f", {max(0.0, time.time() - last['at']):.0f} s ago" if isinstance(last.get("at"), int | float) else ""
    bad = f"; {followed.bad} lines could not be read" if followed.bad else ""
    title = f"{followed.run}: step {last.get('step', '-')}{ago}{bad}"
    sent, dense = last.get("laconic/sent_nbytes"), last.get("laconic/dense_nbytes")
    caption = f"{dense / sent:.1f} × fewer bytes than float32" if sent and dense else ""
    table = Table(title=title, caption=caption)
    for heading, side in (("metric", "left"), ("now", "right"), ("median", "right"), ("", "left")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for name, value in last.items():
        if name in ("at", "step") or name.endswith("_median"):
            continue
        past = followed.history.get(name, [])
        middle = sorted(past)[len(past) // 2] if past else ""
        table.add_row(name.removeprefix("laconic/"), _shown(name, value), _shown(name, middle), sparkline(past[-WIDE:]))
    return table


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_nbytes"):
        return f"{value:,.0f} B"
    return f"{1e3 * value:.2f} ms" if name.endswith("_s") else f"{value:,.6g}"


def sparkline(values: list[float]) -> str:
    """Values as bars between the least and the largest.

    >>> sparkline([0.0, 1.0, 2.0])
    '▁▄█'
    """
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(BARS[int((len(BARS) - 1) * (value - low) / span)] for value in finite)
