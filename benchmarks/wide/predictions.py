"""Steps of `diloco` predicted and measured, on links with latency; a third of the set-ups no fit has seen.

Caller: `wan.py`. Measured as in `laconic bench step`, over whole periods; predicted from a machine's layers, codecs'
speeds and the link alone; fitted and judged by `planner/fit.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.planner.fit import Case, calibrated, fit
from benchmarks.planner.groups import Group, setting_of
from laconic.planner.codec_speeds import speeds
from laconic.planner.cost import cost
from laconic.planner.devices import HERE, device
from laconic.planner.predict import predict
from laconic.planner.strategy import Strategy
from laconic.planner.subject import subject
from laconic.planner.work import measure as measure_work
from laconic.storage.files import cache_folder
from laconic_lab.bench.step import StepSpec, measure

PERIOD = 20
WORKLOADS = ("digits-mlp", "mnist-300-100", "mnist-lenet", "shakespeare-gpt")
LINKS = ("100mbit", "100mbit,5ms", "20mbit,20ms", "20mbit,40ms", "10mbit,100ms")
MODES = (f"diloco({PERIOD})", f"diloco({PERIOD}, fragments=4)", f"diloco({PERIOD}, fragments=2, delay=4)")
CODECS = ("none", "dynamic8")


def groups(most: int | None = None) -> Iterator[tuple[str, Group]]:
    """What is measured together: the workloads on each link, or the first few."""
    for workload, link in itertools.islice(itertools.product(WORKLOADS, LINKS), most):
        yield f"{workload}, {link}", Group(workload, 2, link)


def measure_group(group: Group, blocks: int) -> dict[str, Any]:
    """Seconds of a step by all modes and codecs, and what their predictions are made from."""
    chosen, folder = subject(group.workload), cache_folder()
    ways = {f"distribute:{spec}@{mode}": Strategy(data=group.hosts, codec=spec, consistency=mode, overlap="step")
            for spec in CODECS for mode in MODES}  # fmt: skip
    work = measure_work(chosen, cost(chosen), folder, again=True)
    known = speeds(CODECS, device(HERE, folder), folder)
    found = measure(StepSpec(group.workload, tuple(ways), group.hosts, group.link, blocks=blocks, steps=PERIOD))
    return {
        **asdict(group), "ways": {name: asdict(way) for name, way in ways.items()}, "work": asdict(work),
        "speeds": known, "cores": len(os.sched_getaffinity(0)),
        "step_seconds": {each["config"]: each["step_seconds"] for each in found["results"]},
    }  # fmt: skip


def cases_of(piece: Mapping[str, Any]) -> Iterator[Case]:
    """The set-ups of a group that was measured, predicted anew by the planner as it is now."""
    group, setting = Group(piece["workload"], piece["hosts"], piece["link"]), setting_of(dict(piece))
    for name, way in piece["ways"].items():
        found = predict(setting, Strategy(**way))
        yield Case(f"{group}, {name}", str(group), name, found, piece["step_seconds"][name])


def judged(pieces: Mapping[str, Any]) -> dict[str, Any] | None:
    """Errors of what was held out, after a fit to the others, and whether intervals hold; None without enough."""
    cases = [case for piece in pieces.values() for case in cases_of(piece)]
    held = [case for case in cases if case.held_out]
    if not held or len(held) == len(cases):
        return None
    fitted = fit([case for case in cases if not case.held_out])
    rows = [(case, *calibrated(case, fitted)) for case in held]
    return {
        "held_out": len(held), "set_ups": len(cases),
        "median_error": float(np.median([abs(seconds / case.measured_s - 1) for case, seconds, _, _ in rows])),
        "median_error_unfitted": float(np.median([abs(case.found.seconds / case.measured_s - 1) for case in held])),
        "coverage": float(np.mean([low <= case.measured_s <= high for case, _, low, high in rows])),
    }  # fmt: skip
