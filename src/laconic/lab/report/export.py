"""The report's figures for other programs: tables as CSV, charts as PNG or SVG, metrics for TensorBoard.

Callers: `laconic report --csv --png --tensorboard`. PNG needs a Chromium or Chrome on the PATH (or named by
LACONIC_CHROMIUM), which draws the SVG; without one the SVG files are written, which every browser and editors open.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from laconic.errors import BadInput, MissingExtra
from laconic.lab.records import metrics
from laconic.lab.records.record import Breakdown, Layer, Point, Record
from laconic.lab.records.summary import results, summarise
from laconic.lab.report.figures import figures
from laconic.lab.report.style import chart_style
from laconic.storage.files import replace

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_LONG = ("step_seconds", "curve", "layers", "events", "timeline", "breakdown")
MARGIN = 16  # keeps words off a picture's edge


def write_csv(record: Record, folder: str | os.PathLike[str]) -> list[Path]:
    """Write summary, claims, trials, curves and layers, each a .csv file; returns their paths.

    Fields are as in the record: seconds, bytes, accuracies from 0 to 1; what is not known is empty.
    """
    named = [{"configuration": t.configuration, "seed": t.seed} for t in record.trials]
    both = list(zip(named, record.trials, strict=True))
    tables: dict[str, Iterable[dict[str, Any]]] = {
        "summary": [_summary_row(row) for row in results(record)],
        "claims": [_with_ends(asdict(claim), "interval") for claim in record.claims],
        "trials": [_trial_row(asdict(trial)) for trial in record.trials],
        "curves": [{**name, **asdict(point)} for name, trial in both for point in trial.curve],
        "layers": [{**name, **asdict(layer)} for name, trial in both for layer in trial.layers],
    }
    empty = {"curves": ["configuration", "seed", *_names(Point)], "layers": ["configuration", "seed", *_names(Layer)]}
    texts = {name: _csv(list(rows), empty.get(name, ["configuration"])) for name, rows in tables.items()}
    return [replace(Path(folder) / f"{name}.csv", text) for name, text in texts.items()]


def _summary_row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}


def _trial_row(trial: dict[str, Any]) -> dict[str, Any]:
    parts = trial["breakdown"] or dict.fromkeys(_names(Breakdown))
    plain = {name: value for name, value in trial.items() if name not in _LONG}
    return {**_with_ends(plain, "step_seconds_interval"), **parts}


def _with_ends(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The row with an interval as two columns."""
    low, high = row[name] or (None, None)
    return {**{key: value for key, value in row.items() if key != name}, f"{name}_low": low, f"{name}_high": high}


def _names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


def _csv(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_svg(record: Record, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every chart as an SVG file of its own, light or dark as its reader is; returns the paths."""
    made = figures(record, summarise(record))
    return [replace(Path(folder) / f"{figure.name}.svg", alone(figure.wide)[0]) for figure in made]


def alone(svg: str) -> tuple[str, int, int]:
    """A chart of the page as a drawing of its own, with its style and a margin; and its width and height."""
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"([^>]*>)', svg)
    if found is None:
        raise RuntimeError("a chart without a viewBox")
    width, height = int(found[1]) + 2 * MARGIN, int(found[2]) + 2 * MARGIN
    box = f'"{-MARGIN}" y="{-MARGIN}" width="{width}" height="{height}"'
    inside = f'<style>{chart_style()}</style><rect x={box} style="fill:var(--panel)"/>'
    head = f'viewBox="{-MARGIN} {-MARGIN} {width} {height}"{found[3]}{inside}'
    return f"{svg[: found.start()]}{head}{svg[found.end() :]}\n", width, height


def find_browser() -> str | None:
    """The Chromium that draws PNG files, if there is one.

    Raises:
        BadInput: LACONIC_CHROMIUM names a program that is not there.
    """
    named = os.environ.get("LACONIC_CHROMIUM")
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise BadInput(f"LACONIC_CHROMIUM names '{named}', which is not a program")
        return found
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def write_png(record: Record, folder: str | os.PathLike[str], browser: str) -> list[Path]:
    """Draw every chart as a PNG file, light, two pixels to the unit; returns the paths.

    Raises:
        BadInput: the browser draws nothing within two minutes.
    """
    made = []
    with tempfile.TemporaryDirectory() as scratch:
        for figure in figures(record, summarise(record)):
            svg, width, height = alone(figure.wide)
            page, target = Path(scratch) / f"{figure.name}.html", Path(folder) / f"{figure.name}.png"
            page.write_text(f"<!doctype html><meta charset='utf-8'><style>body{{margin:0}}</style>{svg}", "utf-8")
            target.parent.mkdir(parents=True, exist_ok=True)
            _draw(browser, page, target.absolute(), width, height, scratch)
            made.append(target)
    return made


def _draw(browser: str, page: Path, target: Path, width: int, height: int, scratch: str) -> None:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # for whom Chromium's sandbox refuses to work
    command = [
        browser, "--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--force-device-scale-factor=2",
        "--blink-settings=preferredColorScheme=1", f"--user-data-dir={scratch}/profile", f"--screenshot={target}",
        f"--window-size={width},{height}", *(["--no-sandbox"] if is_root else []), page.as_uri(),
    ]  # fmt: skip
    target.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{browser} did not draw {target.name}: {error}") from error
    if not target.exists():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BadInput(f"{browser} did not draw {target.name}: {last}")


def write_tensorboard(run: str | os.PathLike[str], folder: str | os.PathLike[str]) -> int:
    """Write the metrics of a run for TensorBoard; returns how many scalars there were.

    Raises:
        MissingExtra: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard") from error
    writers: dict[str, Any] = {}
    scalars = 0
    with contextlib.ExitStack() as stack:
        for line in metrics.read(run):
            step, trial = line.pop("step", None), str(line.pop("trial", "run"))
            if not isinstance(step, int):
                continue
            if trial not in writers:
                safe = "".join(c if c.isalnum() or c in "+-_.()," else "_" for c in trial)
                writers[trial] = stack.enter_context(SummaryWriter(str(Path(folder) / safe)))
            for name, value in line.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    writers[trial].add_scalar(name, value, step)
                    scalars += 1
    return scalars
