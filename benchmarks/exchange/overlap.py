"""What a step costs where sending takes half as long as computing, as long, and twice as long.

python -m benchmarks overlap --output benchmarks/results/overlap.json      (root; about 20 minutes)
python -m benchmarks overlap --sets gpt,auto                                one part of it
python -m benchmarks overlap --sets balance --only mnist-mlp --output …     tables with such a title; others stay

Every row is a `laconic bench step` with its peers in the same run. Printed are the aims beside what was reached.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.storage import files
from laconic_lab.bench.step import StepSpec, measure

WORKLOADS = ("shakespeare-gpt", "mnist-mlp", "cifar-convnet")
RATIOS = (0.5, 1.0, 2.0)  # of dynamic8's time on the wire to computing
OURS, PLAIN, DDP_OURS = "distribute:dynamic8", "distribute:dynamic8,overlap=false", "compress:dynamic8"
TOPK = "distribute:topk(0.01)+qsgd(4)"
PEERS = ("ddp", "ddp-fp16", "ddp-powersgd")
WARM_UP = 12  # by then buckets are sent in the order that measured times have given
Table = tuple[str, StepSpec, list["Aim"]]
Rows = dict[str, dict[str, Any]]  # of `laconic bench step`, by configuration
Ratio = Callable[[Rows], float]


@dataclass(frozen=True)
class Aim:
    """A ratio that one configuration is to reach; at most `most`, or at least `least`."""

    says: str
    ratio: Ratio
    most: float | None = None
    least: float | None = None


def bound(name: str, field: str = "ratio_to_bound") -> Ratio:
    return lambda rows: float(rows[name][field])


def quicker(name: str, than: str) -> Ratio:
    return lambda rows: float(rows[than]["step_seconds"] / rows[name]["step_seconds"])


def slower(name: str) -> Ratio:
    return lambda rows: float(rows[name]["step_seconds"] / rows[name]["compute_seconds"])


def balance(like: StepSpec, only: str) -> Iterator[Table]:
    """Each workload at three links, chosen by what it computes and sends on this machine."""
    for workload in (each for each in WORKLOADS if only.split(",")[0] in each):
        spec = replace(like, workload=workload)
        (row,) = measure(replace(spec, blocks=3))["results"]
        for ratio in RATIOS:
            rate = row["sent_nbytes"] * 8 / (ratio * row["compute_seconds"])
            aims = [
                Aim("distribute: × bound", bound(OURS), most=1.2),
                Aim("compress: × DDP's bound", bound(DDP_OURS, "ratio_to_ddp_bound"), most=1.1),
            ]
            if ratio == 1.0:
                aims.append(Aim("overlap: × quicker than without", quicker(OURS, PLAIN), least=1.3))
            names = ["ddp", DDP_OURS, OURS, PLAIN]
            settled = replace(spec, configurations=names, link=f"{max(1, round(rate / 1e6))}mbit")
            yield f"{workload}, wire = {ratio:g} computing", settled, aims


def gpt(like: StepSpec, _: str) -> Iterator[Table]:
    """A small GPT at common links, with every peer: the README's chart."""
    names = [*PEERS, DDP_OURS, OURS, PLAIN, TOPK]
    spec = replace(like, configurations=names, link="100mbit")
    yield (
        "shakespeare-gpt, 100 Mbit/s", spec,
        [
            Aim("distribute: × quicker than DDP", quicker(OURS, "ddp"), least=3.8),
            Aim("top-k: × computing alone", slower(TOPK), most=1.15),
        ],
    )  # fmt: skip
    yield "shakespeare-gpt, 1 Gbit/s", replace(spec, link="1gbit"), []
    yield "shakespeare-gpt, unlimited", replace(spec, link=None), []


def auto(like: StepSpec, _: str) -> Iterator[Table]:
    """Without a limit, "auto" costs nothing."""
    for workload in WORKLOADS:
        names, blocks = ["ddp", "compress:auto"], 2 * like.blocks
        spec = replace(like, workload=workload, configurations=names, link=None, blocks=blocks, warm_up=None)
        yield f"{workload}, no limit", spec, [Aim("auto: × DDP's time", quicker("ddp", "compress:auto"), most=1.02)]


def crowd(like: StepSpec, _: str) -> Iterator[Table]:
    """Four hosts, more than this machine may have cores."""
    names = ["ddp", DDP_OURS, OURS, TOPK]
    spec = replace(like, workload="mnist-mlp", configurations=names, hosts=4, batch=64)  # see docs/research/exchange.md
    yield (
        "mnist-mlp, 4 hosts, 1 Gbit/s", spec,
        [
            Aim("dynamic8: × quicker than DDP", quicker(OURS, "ddp"), least=2.0),
            Aim("top-k: × quicker than DDP", quicker(TOPK, "ddp"), least=2.8),
        ],
    )  # fmt: skip


SETS = {"balance": balance, "gpt": gpt, "auto": auto, "crowd": crowd}


def judged(aim: Aim, rows: Rows) -> dict[str, Any]:
    ratio = aim.ratio(rows)
    reached = ratio <= aim.most if aim.most is not None else ratio >= (aim.least or 0.0)
    return {"aim": aim.says, "most": aim.most, "least": aim.least, "ratio": ratio, "reached": reached}


def aims_table(tables: dict[str, dict[str, Any]]) -> str:
    """Every aim beside what was reached; how blocks of computing alone differ tells the noise."""
    lines = ["| table | link | computing alone, ms (blocks) | aim | wanted | reached |", "|---|---|---|---|---|---|"]
    for title, record in tables.items():
        alone, blocks = record["alone"]["step_seconds"], record["alone"]["block_seconds"]
        spread = f"{1e3 * alone:.0f} ({1e3 * min(blocks):.0f}–{1e3 * max(blocks):.0f})"
        told = f"{title} | {record['configuration']['link']} | {spread}"
        for aim in record["aims"]:
            wanted = f"≤ {aim['most']}" if aim["most"] else f"≥ {aim['least']}"
            verdict = "" if aim["reached"] else ", missed"
            lines.append(f"| {told} | {aim['aim']} | {wanted} | {aim['ratio']:.2f}{verdict} |")
    return "\n".join(lines)


def steps_table(tables: dict[str, dict[str, Any]]) -> str:
    """Every step beside its bounds, for docs/research/overlap.md."""
    heads = ("ms a step", "× bound", "× layers' bound", "× DDP's bound", "processor ms", "loss")
    lines = [f"| table | configuration | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for title, record in tables.items():
        for row in record["results"]:
            bounds = (row.get(f"ratio_to_{each}bound") for each in ("", "layer_", "ddp_"))
            ratios = " | ".join("" if each is None else f"{each:.2f}" for each in bounds)
            spent = f"{1e3 * row['processor_seconds']:.0f} | {row['loss']:.3f}"
            lines.append(f"| {title} | `{row['config']}` | {1e3 * row['step_seconds']:.0f} | {ratios} | {spent} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="which parts, of: " + ", ".join(SETS))
    parser.add_argument("--only", default="", help="tables whose title has this, such as mnist-mlp")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="that count, in a block")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    kept = json.loads(asked.output.read_text())["tables"] if asked.output and asked.output.exists() else {}
    like = StepSpec(WORKLOADS[0], [OURS], link="1gbit", blocks=asked.blocks, steps=asked.steps, warm_up=WARM_UP)
    for name in asked.sets.split(","):
        for title, spec, aims in (each for each in SETS[name](like, asked.only) if asked.only in each[0]):
            begun = time.perf_counter()
            record = measure(spec)
            rows = {row["config"]: row for row in record["results"]}
            kept[title] = {**record, "set": name, "aims": [judged(aim, rows) for aim in aims]}
            print(f"{title} (link {spec.link}, {time.perf_counter() - begun:.0f} s)")
            for config, row in rows.items():
                print(f"  {config:36} {1e3 * row['step_seconds']:7.1f} ms  {row['ratio_to_bound']:.2f} × bound")
            for aim in kept[title]["aims"]:
                wanted = f"at most {aim['most']}" if aim["most"] else f"at least {aim['least']}"
                verdict = "reached" if aim["reached"] else "MISSED "
                print(f"  {verdict} {aim['aim']}: {aim['ratio']:.2f}, {wanted}", flush=True)
            if asked.output:
                files.replace(asked.output, json.dumps({"tables": kept}, indent=1) + "\n")
