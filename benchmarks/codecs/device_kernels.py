"""What the kernels for devices will cost: registers, shared memory and bytes a value, compiled for four architectures.

    python -m benchmarks device-kernels

Compiled ahead of time, without a device: a model, not a measurement.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic_lab.environment import environment

RESULTS = Path(__file__).parents[1] / "results" / "device_kernels.json"


def main(output: Annotated[Path, typer.Option(help="Where the record goes.")] = RESULTS) -> None:
    """Compile every kernel for every architecture, and keep the table."""
    import triton

    from laconic.codecs.device.kernels.ahead import ARCHITECTURES, compile_for, variants
    from laconic.codecs.device.kernels.topk import LAUNCHES

    rows = [dataclasses.asdict(compile_for(variant, name)) for variant in variants() for name in ARCHITECTURES]
    together = {"topk encode_feedback": LAUNCHES}
    record = {"environment": environment(), "triton": triton.__version__, "kernels": rows, "together": together}
    output.write_text(json.dumps(record, indent=1) + "\n")
    typer.echo(table(record))


def table(record: dict[str, Any]) -> str:
    """One row a kernel: bytes a value, then registers and shared memory of each architecture."""
    rows = record["kernels"]
    architectures = list(dict.fromkeys(row["architecture"] for row in rows))
    head = "".join(f" {name}: registers, shared |" for name in architectures)
    lines = [f"| kernel | bytes a value |{head}", "|---|---|" + "---|" * len(architectures)]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = {row["architecture"]: row for row in rows if row["kernel"] == kernel}
        cells = [f"{own[name]['registers']}, {own[name]['shared_nbytes']} B" for name in architectures]
        nbytes = next(iter(own.values()))["nbytes_per_value"]
        lines.append(f"| {kernel} | {nbytes:.2f} | {' | '.join(cells)} |")
    nbytes_of, sums = {row["kernel"]: row["nbytes_per_value"] for row in rows}, []
    for name, launches in record["together"].items():
        total = sum(times * nbytes_of[kernel] for kernel, times in launches.items())
        parts = ", ".join(f"{times} × {kernel}" for kernel, times in launches.items())
        sums.append(f"{name} takes {total:.2f} bytes a value in all: {parts}; a normal distribution, 1 % of it chosen.")
    told = f"Compiled by Triton {record['triton']}, nothing spilled: a model, not a measurement."
    return "\n".join([*lines, "", *sums, "", told])
