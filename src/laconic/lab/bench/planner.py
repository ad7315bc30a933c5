"""Is the planner right? Steps predicted and measured, over many set-ups, a third of which no fit has seen.

Callers: `laconic bench planner`. Steps are measured as `laconic bench step` measures them. A prediction knows one
machine's layers, the codecs' speeds, the link's figures from a probe of this machine, and how many ranks share a core;
and four factors a door, fitted to the set-ups that are not held out. Whether one is held out follows from a hash of its
name, so nobody chooses.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from laconic.lab.bench.collectives import measure_link
from laconic.lab.bench.step import StepSpec, measure
from laconic.lab.clusters.launch import run_job
from laconic.lab.environment import environment
from laconic.planner.cost import cost
from laconic.planner.devices import HERE, device
from laconic.planner.exchanges import speeds
from laconic.planner.plan import keep_calibrations
from laconic.planner.predict import Calibration, Prediction, Setting, door, predict
from laconic.planner.strategy import Strategy
from laconic.planner.subject import subject
from laconic.planner.work import Work
from laconic.planner.work import measure as measure_work
from laconic.schedules.link import Link
from laconic.transports.profile import Profile

WAYS = {
    "ddp": Strategy(),
    "compress:dynamic8": Strategy(codec="dynamic8"),
    "compress:topk(0.01)": Strategy(codec="topk(0.01)"),
    "compress:powersgd": Strategy(codec="powersgd"),
    "distribute:none": Strategy(overlap="step"),
    "distribute:dynamic8": Strategy(codec="dynamic8", overlap="step"),
}
LINKS = (None, "1gbit", "100mbit", "20mbit")
CASES = tuple(
    [(workload, hosts, link) for workload in ("digits-mlp", "mnist-lenet") for hosts in (2, 4) for link in LINKS]
    + [("shakespeare-gpt", 2, "1gbit"), ("shakespeare-gpt", 2, "100mbit")]
)
MEMORY = (("lenet", 1024), ("cifar-resnet(20)", 64), ("char-gpt", 32), ("alexnet", 16), ("resnet18", 8))
PEERS = {"ParaDL": 0.13, "Calculon": 0.0365, "vTrain": 0.115}  # published errors, on other machines
_PULL = 0.05  # how strongly factors are drawn to 1 where measurements say little
_WITHIN, _NEVER = 1.05, 1.10


@dataclass(frozen=True)
class Case:
    """A set-up: predicted before calibration, and measured."""

    name: str
    group: str
    way: str
    found: Prediction
    measured_s: float

    @property
    def held_out(self) -> bool:
        """A third of all names."""
        return held_out(self.name)


def held_out(name: str) -> bool:
    """Whether a set-up of this name is kept from the fit.

    >>> sum(held_out(str(i)) for i in range(3000)) // 100
    9
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 3 == 0


def bench(
    cases: Sequence[tuple[str, int, str | None]] = CASES, blocks: int = 3, steps: int = 3, memory: bool = True,
    folder: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure and predict all cases; returns the record that `laconic bench planner --json` prints.

    Args:
        cases: (workload, hosts, link).
        blocks, steps: of each configuration; see `bench/step.py`.
        memory: measure the peak memory of five models, too.
        folder: of the profiles and the calibration that `laconic plan` reads.
    """
    torch.set_num_threads(1)
    links = {hosts: _loopback(hosts) for hosts in sorted({hosts for _, hosts, _ in cases})}
    found: list[Case] = []
    for workload, hosts, link in cases:
        setting = _setting(workload, hosts, _slowed(links[hosts], link), folder)
        record = measure(StepSpec(workload, list(WAYS), hosts, link, blocks=blocks, steps=steps))
        group = f"{workload} × {hosts}, {link or 'unlimited'}"
        for row in record["results"]:
            way = replace(WAYS[row["config"]], data=hosts)
            name = f"{group}, {row['config']}"
            found.append(Case(name, group, row["config"], predict(setting, way), row["step_seconds"]))
    fitted = fit([case for case in found if not case.held_out])
    keep_calibrations(fitted, folder)
    record = summary(found, fitted)
    record["memory"] = [_memory(name, batch) for name, batch in MEMORY] if memory else []
    return {**record, "peers": PEERS, "configuration": {"blocks": blocks, "steps": steps, "cases": len(cases)},
            "link": {hosts: link.to_dict() for hosts, link in links.items()}, "environment": environment()}  # fmt: skip


def _loopback(hosts: int) -> Link:
    """What messages cost here, whatever the emulated rate."""
    text = run_job(hosts, None, measure_link, (True,))
    return Profile.from_json(text).link


def _slowed(link: Link, rate: str | None) -> Link:
    return link if rate is None else replace(link, s_per_byte=max(link.s_per_byte, Link.parse(rate).s_per_byte))


def _setting(workload: str, hosts: int, link: Link, folder: Path | None) -> Setting:
    """Each host has the workload's batch, as in `bench step`."""
    chosen = subject(workload)
    counted, here = cost(chosen), device(HERE, folder)
    timed: Work = measure_work(chosen, counted, folder, again=True)
    codecs = tuple({way.codec for way in WAYS.values()})
    crowding = max(1.0, hosts / len(os.sched_getaffinity(0)))
    return Setting(timed, counted, counted.batch * hosts, link, speeds(codecs, here, folder), crowding=crowding)


def fit(cases: Sequence[Case]) -> dict[str, Calibration]:
    """Factors of each door that make predictions fit, by relative least squares, none below zero; and the interval."""
    fitted = {}
    for name in sorted({door(case.found.strategy) for case in cases}):
        mine = [case for case in cases if door(case.found.strategy) == name]
        rows = [[c.found.compute_s, c.found.processor_s, c.found.exposed_s, 1e-3] for c in mine]
        table = np.array(rows) / np.array([[c.measured_s] for c in mine])
        pull = _PULL * np.eye(4)
        target = np.concatenate([np.ones(len(mine)), _PULL * np.array([1.0, 1.0, 1.0, 0.0])])
        factors, _ = nnls(np.vstack([table, pull]), target)
        ratios = np.sort(1.0 / (table @ factors))
        low, high = np.quantile(ratios, [0.05, 0.95])
        compute, processor, exposed, fixed = (float(factor) for factor in factors)
        fitted[name] = Calibration(compute, processor, exposed, 1e-3 * fixed, float(min(low, 0.97)),
                                   float(max(high, 1.03)), f"{len(mine)} set-ups measured here")  # fmt: skip
    return fitted


def calibrated(case: Case, fitted: dict[str, Calibration]) -> tuple[float, float, float]:
    """The prediction and its interval after the fit."""
    known, found = fitted.get(door(case.found.strategy), Calibration()), case.found
    seconds = known.compute * found.compute_s + known.processor * found.processor_s
    seconds += known.exposed * found.exposed_s + known.fixed_s
    return seconds, known.low * seconds, known.high * seconds


def summary(cases: Sequence[Case], fitted: dict[str, Calibration]) -> dict[str, Any]:
    """Errors and coverage over what was held out; regret over all groups."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        seconds, low, high = calibrated(case, fitted)
        rows.append({"setup": case.name, "held_out": case.held_out, "predicted_seconds": seconds, "low": low,
                     "high": high, "measured_seconds": case.measured_s, "uncalibrated_seconds": case.found.seconds,
                     "group": case.group, "way": case.way})  # fmt: skip
    kept = [row for row in rows if row["held_out"]] or rows
    errors = [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in kept]
    inside = [row["low"] <= row["measured_seconds"] <= row["high"] for row in kept]
    return {
        "results": rows,
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "coverage": float(np.mean(inside)),
        "regret": _regret(rows),
        "calibration": {name: asdict(each) for name, each in fitted.items()},
    }


def _regret(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How much slower the way that is predicted to be the quickest is than the best measured, and than DDP."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    over_best, over_ddp = [], []
    for mine in groups.values():
        chosen = min(mine, key=lambda row: row["predicted_seconds"])["measured_seconds"]
        over_best.append(chosen / min(row["measured_seconds"] for row in mine))
        over_ddp += [chosen / row["measured_seconds"] for row in mine if row["way"] == "ddp"]
    return {
        "groups": len(groups),
        "within_5_percent": float(np.mean([ratio <= _WITHIN for ratio in over_best])),
        "worst_over_best": max(over_best),
        "worst_over_ddp": max(over_ddp, default=0.0),
        "never_10_percent_slower_than_ddp": max(over_ddp, default=0.0) <= _NEVER,
    }


def _memory(model: str, batch: int) -> dict[str, Any]:
    """Predicted beside the measured peak of a process that trains the model."""
    predicted = cost(model, batch).training_nbytes
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "laconic.lab.bench.planner_memory", model, str(batch)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
    measured = json.loads(done.stdout)["peak_nbytes"]
    return {"model": model, "batch": batch, "predicted_nbytes": predicted, "measured_nbytes": measured,
            "error": predicted / measured - 1}  # fmt: skip
