"""What a step of a 124M GPT would take on GPUs, by link: DDP, its bf16 hook and codecs on the device. A model.

    python -m benchmarks device-model

Nothing here was run on a GPU. Computing follows from an A100's data sheet with an assumed share of its bf16 peak,
codecs from the bytes that their compiled kernels move and from the payload's way over the bus, the wire from the
schedules' closed forms. Exchanges are hidden under backward as far as they fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from laconic.planner.codec_speeds import speeds
from laconic.planner.cost import cost
from laconic.planner.devices import device
from laconic.planner.predict import Setting, predict
from laconic.planner.strategy import Strategy
from laconic.planner.subject import Subject
from laconic.planner.work import estimate
from laconic.schedules.link import Link
from laconic.storage import files
from laconic.workloads.models.gpt import CharGPT
from laconic_lab.environment import environment

RESULTS = Path(__file__).parents[1] / "results" / "device-model.json"
LINKS = ("1gbit,50us", "10gbit,30us", "25gbit,20us")
RANKS, SAMPLES = 4, 12
WAYS = {"DDP": "none", "DDP, bf16 hook": "bf16", "dynamic8": "dynamic8", "topk(0.01)+qsgd(4)": "topk(0.01)+qsgd(4)"}
MACS_PER_S, REACHED = 156e12, 0.4  # bf16 by an A100's tensor cores, and the share of it that is reached: assumed


def gpt() -> torch.nn.Module:
    """A model of GPT-2's small size."""
    return CharGPT(50304, 1024, 12, 768, 12, tied=True)


def model() -> dict[str, Any]:
    """The step's seconds by link and way."""
    subject = Subject("gpt-124m", gpt, (1024,), torch.int64, SAMPLES, torch.optim.AdamW)
    machine = replace(device("a100"), macs_per_s=MACS_PER_S, most=REACHED)
    counted = cost(subject, SAMPLES)
    work, specs = estimate(counted, machine), tuple(WAYS.values())
    rows = []
    for link in LINKS:
        setting = Setting(work, counted, RANKS * SAMPLES, Link.parse(link), speeds(specs, machine, None),
                          shares_core=False)  # fmt: skip
        for name, spec in WAYS.items():
            found = predict(setting, Strategy(data=RANKS, codec=spec))
            rows.append({
                "link": link, "way": name, "seconds": found.seconds, "compute_seconds": found.compute_s,
                "codec_seconds": found.processor_s, "exposed_seconds": found.exposed_s,
                "sent_nbytes": found.sent_nbytes,
            })  # fmt: skip
    asked = {"ranks": RANKS, "samples_a_rank": SAMPLES, "parameters": _parameters()}
    return {"simulated": True, **asked, "results": rows, "environment": environment()}


def _parameters() -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in gpt().parameters())


def table(record: dict[str, Any]) -> str:
    """One row a way, one column a link: milliseconds a step, beside the infinite network's."""
    rows = record["results"]
    links, ways = dict.fromkeys(row["link"] for row in rows), dict.fromkeys(row["way"] for row in rows)
    by = {(row["link"], row["way"]): row for row in rows}
    lines = [f"| modelled step | sent | {' | '.join(f'{link}' for link in links)} |", "|---|---|" + "---|" * len(links)]
    for way in ways:
        cells = [f"{1e3 * by[link, way]['seconds']:.0f} ms" for link in links]
        sent = by[next(iter(links)), way]["sent_nbytes"]
        lines.append(f"| {way} | {sent / 1e6:.0f} MB | {' | '.join(cells)} |")
    computing = 1e3 * rows[0]["compute_seconds"]
    return "\n".join([*lines, "", (
        f"A model, not a measurement: {record['parameters'] / 1e6:.0f}M parameters, {record['ranks']} A100s with "
        f"{record['samples_a_rank']} × 1024 tokens each; computing alone {computing:.0f} ms ({REACHED:.0%} of the bf16 "
        "peak, assumed); float32 gradients."
    )])  # fmt: skip


def main(output: Annotated[Path, typer.Option(help="Where the record goes.")] = RESULTS) -> None:
    """Model the steps, and keep the table."""
    record = model()
    files.replace(output, json.dumps(record, indent=1) + "\n")
    typer.echo(table(record))
