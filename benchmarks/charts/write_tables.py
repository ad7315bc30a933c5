"""Writes the tables of some pages from the benchmarks' records, so that no figure is copied by hand.

    python -m benchmarks write-tables

A table stands between `<!-- table NAME -->` and `<!-- end -->`; what is between them is replaced. Where a record is
missing the page says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos import table as chaos
from benchmarks.codecs import device_kernels as device_kernels
from benchmarks.codecs import device_triton_versions as device_triton_versions
from benchmarks.consistency import consistency as consistency
from benchmarks.divide import delta as delta
from benchmarks.divide import divide_speeds as speed
from benchmarks.exchange import emulated_links as emulated_links
from benchmarks.exchange import overlap as overlap
from benchmarks.exchange import step_losses as losses
from benchmarks.papers import eightbit_divided as divided
from benchmarks.papers import eightbit_paper as paper
from benchmarks.papers import sparcml as sparcml
from benchmarks.planner import device_model as device_model

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "<!-- table " in page.read_text())
RESULTS = Path(__file__).parents[1] / "results"
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Record = dict[str, Any]


def sparcml_table(record: Record) -> str:
    learnt = record["accuracy"]["results"]
    steps, target = record["accuracy"]["plan"]["steps"], record["accuracy"]["plan"]["target"]
    reached = "; ".join(
        f"`{row['configuration']}` {100 * row['test_accuracy']:.2f} %, {100 * target:g} % "
        + (f"after {row['steps_to_target']}" if row["steps_to_target"] else "not reached")
        for row in learnt
    )  # fmt: skip
    wires = ", ".join(
        f"{1e3 * link['fp32_wire_seconds']:.0f} ms at {link['link']}" for link in record["links"] if link["link"]
    )
    loads = ", ".join(f"{link['load_average_before']:.1f}" for link in record["links"])
    return "\n\n".join([
        f"Learnt in {steps} steps: {reached}.",
        sparcml.table(record["links"]),
        f"The least that float32's bytes need on the wire: {wires}. Load of the machine before each link: {loads}.",
    ])  # fmt: skip


def cifar_table(record: Record) -> str:
    runs = record["runs"]
    error = 1 - runs[0]["accuracy"]
    known = 1.96 * math.sqrt(error * (1 - error) / 10_000)
    return paper.cifar_table(paper.Settings(**record["settings"]), runs) + (
        f"\n\nOf 10,000 test images one error of {100 * error:.1f} % is known to ± {100 * known:.1f} points (95 %), "
        f"{100 * known / error:.1f} % of itself, before another seed changes anything."
    )


def transfer_table(record: Record) -> str:
    load = f"Load of the machine before: {record['load_average_before']:.1f}."
    return paper.transfer_table(record["link"], record["sizes"]) + f"\n\n{load}"


def divided_table(record: Record) -> str:
    return paper.cifar_table(divided.Divided(**record["settings"]), record["runs"])


def memory_table(record: Record) -> str:
    lines = ["| ranks | weights | limit of a rank | peak of a rank | outcome |", "|---|---|---|---|---|"]
    for row in record["results"]:
        losses, failed = row["losses"], row["failed"]
        outcome = (
            f"does not fit: {failed.rpartition(': ')[2]}" if failed
            else f"trains: loss {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} steps"
        )  # fmt: skip
        memory = f"{row['limit_mb']} MB | {row['peak_mb']:.0f} MB"
        lines.append(f"| {row['ranks']} | {row['weights']:,} | {memory} | {outcome} |")
    return "\n".join(lines)


def gpt_table(table: Record) -> str:
    """One link's steps and losses alone, for those who have to choose."""
    alone, rows = table["alone"]["compute_seconds"], table["results"]
    wire = next(row["wire_seconds"] for row in rows if row["config"] == "ddp")
    lines = ["| | ms a step | loss after the same steps |", "|---|---|---|"]
    lines += [f"| computing alone | {1e3 * alone:.0f} | |"]
    lines += [f"| `{row['config']}` | {1e3 * row['step_seconds']:.0f} | {row['loss']:.3f} |" for row in rows]
    said = f"Wire {wire:.1f} s, computing {1e3 * alone:.0f} ms: a ratio of {wire / alone:.1f}."
    return "\n".join([said, "", *lines])


def first_use_table(record: Record) -> str:
    names = {"trained": "`laconic train`", "own_script": "own DDP script"}
    lines = ["| run | codec | kernel cache | whole command | `compress(…)` | first step | longest | median |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in record["results"]:
        opened = f"{row['compress_s']:.1f} s" if "compress_s" in row else ""
        steps = " | ".join(f"{1e3 * row[f'{which}_step_s']:.0f} ms" for which in ("first", "longest", "median"))
        run = f"| {names[row['run']]} | `{row['codec']}` | {row['cache']}"
        lines.append(f"{run} | {row['command_s']:.0f} s | {opened} | {steps} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Record], str]] = {
    "chaos": chaos.page,
    "chaos-anywhere": lambda record: chaos.page(record, ("fault", "case")),
    "device-model": device_model.table,
    "emulated-links": emulated_links.table,
    "consistency": lambda record: consistency.table(record["comparisons"]),
    "8bit-cifar": cifar_table,
    "8bit-divided-alexnet": divided.alexnet_table,
    "8bit-divided-cifar": divided_table,
    "8bit-divided-errors": lambda record: divided.errors_table(record["layers"]),
    "8bit-divided-mnist": divided_table,
    "delta": lambda record: delta.table(record["runs"]),
    "device_kernels": device_kernels.table,
    "device_triton_versions": device_triton_versions.table,
    "divide-memory": memory_table,
    "8bit-transfer": transfer_table,
    "first-use": first_use_table,
    "parity-mnist": lambda record: paper.mnist(RESULTS / "parity-mnist.json"),
    "sparcml": sparcml_table,
    "step-losses": losses.table,
}


def block(name: str) -> str:
    """What stands between the marks of a table."""
    if name == "divide":  # of several records
        return f"{speed.table()}\n\nFrom `benchmarks/results/divide-*.json`."
    if name.startswith("times-"):
        run = name.removeprefix("times-")
        return f"{speed.times(run)}\n\nFrom `benchmarks/results/divide-{run}.json`."
    if name.startswith("overlap-"):  # one record, several tables
        tables = json.loads((RESULTS / "overlap.json").read_text())["tables"]
        if name == "overlap-gpt":
            return f"{gpt_table(tables['shakespeare-gpt, 100 Mbit/s'])}\n\nFrom `benchmarks/results/overlap.json`."
        kind = overlap.aims_table if name == "overlap-aims" else overlap.steps_table
        return f"{kind(tables)}\n\nFrom `benchmarks/results/overlap.json`."
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not measured yet."
    record = json.loads(path.read_text())
    made = (record["comparisons"][-1] if "comparisons" in record else record)["environment"]
    source = f"`benchmarks/results/{name}.json`, commit {made['commit']}, {made['cores']} cores of {made['cpu']}."
    return f"{TABLES[name](record)}\n\nFrom {source}"


def page(text: str) -> str:
    """The page with every table made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}\n{found[3]}", text)


def main() -> None:
    """Write every page anew."""
    for path in PAGES:
        path.write_text(page(path.read_text()))
