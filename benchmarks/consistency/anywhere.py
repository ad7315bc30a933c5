"""What joining, slow members and failed rounds cost an elastic job on emulated hosts.

    python -m benchmarks anywhere --json benchmarks/results/anywhere.json

Parts, each kept in the file as soon as it is measured, and left out the next time: `join`, a newcomer loads a state of
200 MB at 100 Mbit/s while three members train by `diloco`; `unequal`, three members with one that is five times slower,
by equal shares, by speed and by a quorum; `memory`, what a member holds over many failed rounds and joins. Computing is
a pause of fixed length, so that several members fit on a few cores.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import laconic
from laconic.errors import UnknownName
from laconic.storage.files import replace
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.environment import environment

JOIN_NUMEL = 12_500_000  # 50 MB of weights: with Adam's two moments and the outer momentum 200 MB


def train(folder: str, numel: int, pause_s: float, options: dict[str, Any]) -> dict[str, Any]:
    """One member, until the folder has a file `stop`: when each of its committed steps was done, and its samples.

    Args:
        pause_s: computing of one sample.
    """
    begun = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(numel // 100, 100, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    data = laconic.Samples(1 << 20, options.pop("batch"), epochs=1000)
    done: list[tuple[float, int]] = []
    with laconic.elastic(model, optimizer, data, folder, patience_s=120.0, **options) as job:
        joined = time.monotonic()
        for batch in job.batches():
            time.sleep(pause_s * len(batch))
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            if job.step():
                done.append((time.monotonic(), len(batch)))
            if Path(folder, "stop").exists():
                break
        return {"worker": job.worker, "begun": begun, "joined": joined, "done": done}


def _seconds_per_step(done: list[tuple[float, int]], begin: float, end: float) -> float:
    within = [at for at, _ in done if begin <= at <= end]
    return (within[-1] - within[0]) / (len(within) - 1)


def join(numel: int = JOIN_NUMEL, period: int = 50, pause_s: float = 0.025, blocks: int = 4) -> dict[str, Any]:
    """Seconds a step of the members, before and while a newcomer loads the state and joins."""
    options = {"consistency": f"diloco({period})", "batch": 24, "workers": 3}
    block_s = period * 8 * pause_s
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=4, link="100mbit") as cluster:
        members = [cluster.start_on(host, train, (folder, numel, pause_s, options)) for host in range(3)]
        time.sleep(20 + blocks * 2 * block_s)
        newcomer = cluster.start_on(3, train, (folder, numel, pause_s, options))
        time.sleep(30 + blocks * 2 * block_s + 8 * numel * 16 / 1e8)
        Path(folder, "stop").touch()
        late = newcomer.results(300)[0]
        first = members[0].results(300)[0]
    steps = [at for at, _ in first["done"]]
    alone = _seconds_per_step(first["done"], steps[2 * period], late["begun"])
    end = next(at for at in steps if at > late["joined"])
    loading = _seconds_per_step(first["done"], late["begun"], end + block_s)
    return {"state_MB": numel * 16 / 1e6, "block_s": block_s, "seconds_to_join": late["joined"] - late["begun"],
            "step_s_alone": alone, "step_s_while_loading": loading, "delay": loading / alone - 1}  # fmt: skip


def unequal(pause_s: float = 0.01, seconds: float = 30.0) -> dict[str, Any]:
    """Samples a second that three equal members make together, alone and with a fourth that is five times slower."""
    ways: dict[str, dict[str, Any]] = {"alone": {}, "equal": {}, "speed": {"shares": "speed"}, "quorum": {"quorum": 3}}
    rates = {}
    for name, way in ways.items():
        count = 3 if name == "alone" else 4
        options = {"batch": 24 if name == "alone" else 32, "workers": count, **way}
        with tempfile.TemporaryDirectory() as folder, Cluster(hosts=4, link="1gbit") as cluster:
            pauses = [pause_s] * 3 + [5 * pause_s]
            jobs = [cluster.start_on(host, train, (folder, 10_000, pauses[host], options)) for host in range(count)]
            time.sleep(15 + seconds)
            Path(folder, "stop").touch()
            results = [job.results(120)[0] for job in jobs]
        # Workers number themselves as they come; the slow one is the last host's.
        end = min(result["done"][-1][0] for result in results[:3])
        within = [sum(n for at, n in result["done"] if end - seconds < at <= end) for result in results]
        rates[name] = {"fast_samples_per_s": sum(within[:3]) / seconds, "slow_samples_per_s": sum(within[3:]) / seconds}
    base = rates["alone"]["fast_samples_per_s"]
    return {**rates, "lost": {name: 1 - rate["fast_samples_per_s"] / base for name, rate in rates.items()}}


def _come_and_go(folder: str, rounds: int, numel: int) -> int:
    """Join, make two steps, and leave in the middle of the third, so many times."""
    made = 0
    while made < rounds:
        model = nn.Linear(numel // 100, 100, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        data = laconic.Samples(1 << 20, 4, epochs=1000)
        with laconic.elastic(model, optimizer, data, folder, codec="none", patience_s=30.0) as job:
            for calls, _ in enumerate(job.batches()):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e-3)
                if calls == 2:
                    break  # the others wait for this worker's part, and repeat the step without it
                job.step()
        made += 1
    return made


def _stay(folder: str, numel: int) -> list[float]:
    """Train until the folder has a file `stop`: the memory held, in MB, every second."""
    model = nn.Linear(numel // 100, 100, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    data, held, looked_at = laconic.Samples(1 << 20, 4, epochs=1000), [], 0.0
    with laconic.elastic(model, optimizer, data, folder, codec="none", patience_s=30.0) as job:
        for _ in job.batches():
            time.sleep(0.01)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            job.step()
            if time.monotonic() - looked_at > 1.0:
                looked_at = time.monotonic()
                gc.collect()
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                held.append(pages * 4096 / 1e6)
                if Path(folder, "stop").exists():
                    break
    return held


def memory(rounds: int = 1000, joins: int = 200, numel: int = 100_000) -> dict[str, Any]:
    """The memory of a member while another one joins and leaves in the middle of a step.

    Args:
        rounds: failed rounds with a model that is sent at once; then `joins` with one that is loaded in chunks.
    """
    found = {}
    for name, count, size in (("failed_rounds", rounds, 10_000), ("joins", joins, numel)):
        with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2, link="unlimited") as cluster:
            staying = cluster.start_on(0, _stay, (folder, size))
            time.sleep(5)
            made = cluster.start_on(1, _come_and_go, (folder, count, size)).results(60 + 5.0 * count)[0]
            Path(folder, "stop").touch()
            held = staying.results(60)[0]
        early = held[len(held) // 4]
        found[name] = {
            "count": made,
            "MB_after_a_quarter": early,
            "MB_at_the_end": held[-1],
            "grown_MB": held[-1] - early,
        }
    return found


PARTS = {"join": join, "unequal": unequal, "memory": memory}
ALL = ",".join(PARTS)
Json = Annotated[Path | None, typer.Option("--json", help="Where to keep the figures; what is there is not measured.")]
Only = Annotated[str, typer.Option(help=f"Parts to measure, with commas: {', '.join(PARTS)}.")]
Short = Annotated[bool, typer.Option("--short", help="Small sizes, to see that it works; the figures mean nothing.")]


def main(output: Json = None, only: Only = ALL, short: Short = False) -> None:
    """Measure the parts that are not in the file yet."""
    known = json.loads(output.read_text()) if output is not None and output.exists() else {}
    small: dict[str, dict[str, Any]] = {
        "join": {"numel": 500_000, "period": 10, "pause_s": 0.01, "blocks": 2},
        "unequal": {"pause_s": 0.002, "seconds": 5.0},
        "memory": {"rounds": 10, "joins": 4},
    }
    for name in only.split(","):
        if name not in PARTS:
            raise UnknownName("part", name, PARTS)
        if name not in known:
            known[name] = PARTS[name](**(small[name] if short else {}))  # type: ignore[operator]
            known["environment"] = environment()
            if output is not None:
                replace(output, json.dumps(known, indent=2) + "\n")
    typer.echo(json.dumps(known, indent=2))
