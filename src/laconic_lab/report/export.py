"""The report's figures for other programs: tables as CSV, charts as PNG or SVG, metrics for TensorBoard.

Callers: `laconic report --csv --png --svg --tensorboard`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from laconic.errors import MissingExtra
from laconic.storage.files import replace
from laconic_lab.records import metrics
from laconic_lab.records.record import Breakdown, LayerRecord, Point, Record
from laconic_lab.records.summary import results, summarise
from laconic_lab.report.canvas import PAPER, WIDE
from laconic_lab.report.figures import figures

_LONG = ("step_seconds", "curve", "layers", "noise", "events", "timeline", "breakdown")


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
    empty = {
        "curves": ["configuration", "seed", *_names(Point)],
        "layers": ["configuration", "seed", *_names(LayerRecord)],
    }
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
    return [replace(Path(folder) / f"{figure.name}.svg", figure.draw(WIDE).alone()) for figure in made]


def write_png(record: Record, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every chart as a PNG file, light, two pixels to the unit; returns the paths."""
    made = figures(record, summarise(record))
    return [replace(Path(folder) / f"{figure.name}.png", figure.draw(PAPER).png()) for figure in made]


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
