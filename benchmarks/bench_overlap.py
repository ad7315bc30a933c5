"""The table of docs/overlap.md: what a step costs where sending is half of computing, as long, and twice as long.

python benchmarks/bench_overlap.py --output benchmarks/results/overlap.json      (root; about 20 minutes)
python benchmarks/bench_overlap.py --sets gpt,auto                                one part of it

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

from laconic.lab.bench.step import StepSpec, measure
from laconic.storage import files

WORKLOADS = ("shakespeare-gpt", "mnist-mlp", "cifar-convnet")
RATIOS = (0.5, 1.0, 2.0)  # of dynamic8's time on the wire to computing
OURS, PLAIN, DDP_OURS = "distribute:dynamic8", "distribute:dynamic8,overlap=false", "compress:dynamic8"
TOPK = "distribute:topk(0.01)+qsgd(4)"
PEERS = ("ddp", "ddp-fp16", "ddp-powersgd")
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


def balance(blocks: int) -> Iterator[tuple[str, StepSpec, list[Aim]]]:
    """Each workload at three links, chosen by what it computes and sends on this machine."""
    for workload in WORKLOADS:
        spec = StepSpec(workload, [OURS], hosts=2, link="1gbit", blocks=3)
        (row,) = measure(spec)["results"]
        for ratio in RATIOS:
            rate = row["sent_nbytes"] * 8 / (ratio * row["compute_seconds"])
            aims = [
                Aim("distribute: × bound", bound(OURS), most=1.2),
                Aim("compress: × DDP's bound", bound(DDP_OURS, "ratio_to_ddp_bound"), most=1.1),
            ]
            if ratio == 1.0:
                aims.append(Aim("overlap: × quicker than without", quicker(OURS, PLAIN), least=1.3))
            names = ["ddp", DDP_OURS, OURS, PLAIN]
            settled = replace(spec, configurations=names, link=f"{max(1, round(rate / 1e6))}mbit", blocks=blocks)
            yield f"{workload}, wire = {ratio:g} computing", settled, aims


def gpt(blocks: int) -> Iterator[tuple[str, StepSpec, list[Aim]]]:
    """A small GPT at common links, with every peer: the README's chart."""
    names = [*PEERS, DDP_OURS, OURS, PLAIN, TOPK]
    spec = StepSpec(WORKLOADS[0], names, hosts=2, link="100mbit", blocks=blocks)
    yield (
        "shakespeare-gpt, 100 Mbit/s", spec,
        [
            Aim("distribute: × quicker than DDP", quicker(OURS, "ddp"), least=3.8),
            Aim("top-k: × computing alone", slower(TOPK), most=1.15),
        ],
    )  # fmt: skip
    yield "shakespeare-gpt, 1 Gbit/s", replace(spec, link="1gbit"), []


def auto(blocks: int) -> Iterator[tuple[str, StepSpec, list[Aim]]]:
    """Without a limit, "auto" costs nothing."""
    for workload in WORKLOADS:
        spec = StepSpec(workload, ["ddp", "compress:auto"], hosts=2, blocks=2 * blocks)
        yield f"{workload}, no limit", spec, [Aim("auto: × DDP's time", quicker("ddp", "compress:auto"), most=1.02)]


def crowd(blocks: int) -> Iterator[tuple[str, StepSpec, list[Aim]]]:
    """Four hosts, more than this machine may have cores."""
    spec = StepSpec("mnist-mlp", ["ddp", DDP_OURS, OURS, TOPK], hosts=4, link="1gbit", blocks=blocks)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="which parts, of: " + ", ".join(SETS))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    kept = json.loads(asked.output.read_text())["tables"] if asked.output and asked.output.exists() else {}
    for name in asked.sets.split(","):
        for title, spec, aims in SETS[name](asked.blocks):
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


if __name__ == "__main__":
    main()
