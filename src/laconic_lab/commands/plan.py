"""`laconic plan` and `laconic profile`: recommend a strategy for N machines, and time this machine's layers."""

from __future__ import annotations

import json as json_module
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic import words
from laconic.cli.cost import Rule, Shape, Type
from laconic.cli.shared import FOLLOWING, Json, echo_json, echo_table, progress_bar
from laconic.errors import BadInput
from laconic.planner.cost import cost as count
from laconic.planner.devices import HERE, TABLE, UNSURE, Device, kept_in
from laconic.planner.growth import Phase, phases, totals
from laconic.planner.plan import LOSS, Asked, Planned, ScalePoint, crossings, describe
from laconic.planner.plan import plan as make
from laconic.planner.plan import scale as scan
from laconic.planner.predict import Prediction
from laconic.planner.subject import Subject, parse_shape, subject
from laconic.planner.work import measure
from laconic.quantities import parse_nbytes
from laconic.storage.files import cache_folder, replace
from laconic.workloads import Changes
from laconic.workloads.batch_schedules import CONSTANT
from laconic.workloads.batch_schedules import batch_schedule as named_schedule
from laconic_lab.commands import run_options
from laconic_lab.runs.spec import RunSpec
from laconic_lab.runs.train import train as start

HEADINGS = ("plan", "step", "from – to", "computing", "codec", "waiting", "sent", "memory", "DRAM energy")
SHOWN = 6
Model = Annotated[str | None, typer.Argument(help="A network or workload by name, or your own, module:factory.")]


def plan(
    model: Model = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Machines.")] = 4,
    link: Annotated[str, typer.Option(help="Link between two machines: 1gbit,50us.")] = "1gbit,50us",
    between: Annotated[str | None, typer.Option(help="Link between hosts of --per-host machines: 10gbit,20us.")] = None,
    per_host: Annotated[int, typer.Option(help="Machines (GPUs) per host, for --between.")] = 1,
    batch: Annotated[int | None, typer.Option(help="Samples per step over all machines. Default: 32 each.")] = None,
    input_shape: Shape = None,
    input_type: Type = None,
    optimizer: Rule = None,
    device_profile: Annotated[str, typer.Option(help=f"here, or {', '.join(sorted(TABLE))}.")] = "here",
    memory: Annotated[str | None, typer.Option(help="Memory of each machine: 8GB. Default: the profile's.")] = None,
    quality: Annotated[str, typer.Option(help="What may be proposed: exact, 8bit or aggressive.")] = "8bit",
    scale: Annotated[bool, typer.Option("--scale", help="Predict every power of two up to -n.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan as JSON.")] = None,
    batch_schedule: run_options.BatchSchedule = None,
    run: Annotated[bool, typer.Option("--run", help="Train the workload by this plan, on local workers.")] = False,
    json: Json = False,
) -> None:
    """Predict the step time of every way to train a model on N machines, and recommend one."""
    if model is None:
        raise BadInput("name a model: laconic plan vgg16 -n 16 --link 1gbit,50us")
    chosen = subject(model, None if input_shape is None else parse_shape(input_shape), input_type, optimizer)
    limit = None if memory is None else parse_nbytes(memory)
    asked = Asked(ranks, link, batch, device_profile, limit, quality, between, per_host)
    with progress_bar(FOLLOWING, quiet=json):
        planned = make(chosen, asked)
        points = scan(chosen, asked) if scale or html else []
    grown = [] if batch_schedule is None else phases(planned, named_schedule(batch_schedule))
    if output is not None:
        replace(output, planned.plan().to_json())
    if html is not None:
        from laconic_lab.report.plan_page import page  # with Matplotlib, which takes seconds to load

        replace(html, page(planned, points))
    if json:
        record = {"plan": json_module.loads(planned.plan().to_json()), "verdict": planned.verdict(),
                  "candidates": [describe(each) for each in planned.candidates], "dropped": planned.dropped,
                  "memory_nbytes": planned.limit_nbytes, "one_machine": describe(planned.one),
                  "ddp": planned.ddp and describe(planned.ddp), "apart": _apart(planned),
                  "device": planned.setting.device and vars(planned.setting.device),
                  "scale": [vars(point) for point in points], "training": [vars(phase) for phase in grown],
                  "simulated": True}  # fmt: skip
        echo_json(record)
    else:
        typed = {"--input-shape": input_shape, "--input-type": input_type, "--optimizer": optimizer}
        options = [word for option, value in typed.items() if value is not None for word in (option, value)]
        _show(planned, shlex.join([model, "--batch", str(planned.setting.cost.batch), *options]))
        if scale:
            _scale(points)
        if grown:
            _growth(grown, phases(planned, CONSTANT))
    if run:
        _run(planned, chosen, batch_schedule)


def _shown(planned: Planned) -> list[Prediction]:
    """The recommended plan, the quickest few by name, data parallelism with the quickest codec, DDP, one machine."""
    coded = [each for each in planned.candidates if each.strategy.kind == "data" and each.strategy.codec != "none"]
    rows = [planned.chosen, *planned.candidates[:SHOWN], *coded[:1]]
    rows += [each for each in (planned.ddp, planned.one) if each is not None and planned.fits(each)]
    return list({str(each.strategy): each for each in rows}.values())


def _show(planned: Planned, arguments: str) -> None:
    """The table and the verdict; `arguments` are those by which `laconic profile` measures what this plan needs."""
    rows = []
    for each in _shown(planned):
        mark = "→ " if each.strategy == planned.chosen.strategy else "  "
        rows.append([words.plain(cell) for cell in (
            mark + str(each.strategy), words.seconds(each.seconds),
            words.seconds_range(each.low, each.high), words.seconds(each.compute_s),
            words.seconds(each.processor_s), words.seconds(each.exposed_s), words.nbytes(each.sent_nbytes),
            words.nbytes(each.memory_nbytes), f"{each.joules:.3g} J",
        )])  # fmt: skip
    asked, setting = planned.asked, planned.setting
    times = setting.work.source
    if times == HERE:
        times = f"estimated for this machine (`laconic profile {arguments}` measures them)"
    typer.echo(
        f"{planned.subject.name} on {asked.ranks} machines, {setting.batch} samples a step, link {asked.links}; layer "
        f"times: {times}; predicted, not measured"
    )
    echo_table(HEADINGS, rows)
    if setting.device is not None and setting.device.name == HERE:
        _show_machine(setting.device)
    for sentence in planned.verdict():
        typer.echo(sentence)
    _show_apart(planned)
    if planned.dropped:
        limit = words.plain(words.nbytes(planned.limit_nbytes or 0))
        plans = "1 plan needs" if planned.dropped == 1 else f"{planned.dropped} plans need"
        typer.echo(f"{plans} more than {limit} a machine and {'is' if planned.dropped == 1 else 'are'} not shown.")
    if not setting.calibrations and asked.device == HERE:
        typer.echo("The intervals are wide because no step was measured on this machine; see docs/guides/plan.md.")


def _apart(planned: Planned) -> dict[str, Any] | None:
    """The recommended way of training apart for JSON: what it takes, and the rates that shares of computing need."""
    if planned.apart is None:
        return None
    needed = [{"utilisation": share, "rate_bps": rate} for share, rate in planned.rates_needed().items()]
    return {**describe(planned.apart), "rates_needed": needed, "loss": LOSS}


def _show_apart(planned: Planned) -> None:
    """How busy the machines are when they train apart, what link they need, and what is not predicted."""
    found = planned.apart
    if found is None:
        return
    needed = [f"{words.percent(share, 0)}: {'no rate is enough' if rate is None else words.rate(rate)}"
              for share, rate in planned.rates_needed().items()]  # fmt: skip
    typer.echo(words.plain(
        f"Training apart by {found.strategy}: {words.seconds(found.seconds)} a step, of which the machines compute "
        f"{words.percent(found.utilisation, 0)}; {words.nbytes(found.sent_nbytes)} sent a step. The link's rate for "
        f"utilisations of {', '.join(needed)}."
    ))  # fmt: skip
    typer.echo(LOSS)


def _show_machine(here: Device) -> None:
    """What the times are estimated from, and where that is kept."""
    kept = "" if here.busy else f"; kept in {kept_in()}, delete it to measure anew"
    typer.echo(words.plain(
        f"This machine, measured: {2e-9 * here.macs_per_s:.3g} GFLOP/s, memory {here.bandwidth_Bps / 1e9:.3g} GB/s, "
        f"{words.seconds(here.call_s)} to start a layer{kept}."
    ))  # fmt: skip


def _scale(points: list[ScalePoint]) -> None:
    if not points:
        typer.echo("There is no way to divide this model, with this batch, among so many machines.")
        return
    typer.echo("\nBy number of machines (simulated): the quickest way of each kind, and its efficiency")
    kinds = ("data", "tensor", "pipeline", "hybrid")
    best = [min(point.seconds, key=lambda kind: point.seconds[kind]) for point in points]
    rows = []
    for point, quickest in zip(points, best, strict=True):
        cells = [f"{words.seconds(point.seconds[k])} ({100 * point.efficiency(k):.0f} %)" if k in point.seconds else ""
                 for k in kinds]  # fmt: skip
        rows.append([words.plain(cell) for cell in (
            str(point.ranks), str(point.batch), *cells, f"{point.cost(quickest):.3g}")])  # fmt: skip
    echo_table(("machines", "batch", *kinds, "machine-seconds for 1,000 samples"), rows)
    for line in crossings(points):
        typer.echo(line)


def _growth(grown: list[Phase], constant: list[Phase]) -> None:
    """The epochs of a batch that grows, and the whole training beside one whose batch stays."""
    typer.echo("\nThe whole training (predicted); accuracy is not, see docs/reference/workloads.md")
    rows = []
    for phase in grown:
        cells = (str(phase.epochs), str(phase.batch), f"{phase.steps:,}", words.seconds(phase.seconds),
                 words.nbytes(phase.sent_nbytes), words.nbytes(phase.memory_nbytes))  # fmt: skip
        rows.append([words.plain(cell) for cell in cells])
    echo_table(("epochs", "batch", "steps", "a step", "sent a step", "memory"), rows)
    (count, seconds, sent), (base, base_s, base_sent) = totals(grown), totals(constant)
    typer.echo(words.plain(
        f"{count:,} steps, {words.seconds(seconds)} and {words.nbytes(sent)} sent by each machine, instead of "
        f"{base:,}, {words.seconds(base_s)} and {words.nbytes(base_sent)} with a batch that stays."
    ))  # fmt: skip


def _run(planned: Planned, chosen: Subject, batch_schedule: str | None) -> None:
    """Train by the plan, on workers of this machine."""
    if chosen.workload is None:
        raise BadInput(f"--run trains a workload, and '{chosen.name}' is a network without data; see laconic train")
    found = planned.plan(trainable=True)
    typer.echo(f"training by: {found.strategy}", err=True)
    done = start(RunSpec(chosen.workload.name, found.strategy.ranks, [found.configuration], changes=Changes(
        batch=found.batch, batch_schedule=batch_schedule), command=run_options.command()))  # fmt: skip
    if done is not None:
        typer.echo(f"trained by the plan; report: {done.folder / 'report.html'}", err=True)


def profile(
    model: Annotated[str, typer.Argument(help="A network or workload by name, or your own, module:factory.")],
    batch: Annotated[int | None, typer.Option(help="Samples per step. Default: the workload's, or 1.")] = None,
    input_shape: Shape = None,
    input_type: Type = None,
    optimizer: Rule = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again, even if results are kept.")] = False,
    json: Json = False,
) -> None:
    """Measure the forward and backward time of each layer on this machine, for laconic plan."""
    chosen = subject(model, None if input_shape is None else parse_shape(input_shape), input_type, optimizer)
    counted = count(chosen, batch)
    found = measure(chosen, counted, cache_folder(), again)
    if json:
        return echo_json({"model": chosen.name, "batch": found.batch, "forward_seconds": found.forward_s,
                          "backward_seconds": found.backward_s, "optimizer_seconds": found.optimizer_s,
                          "spread": found.spread, "busy": found.busy,
                          "layers": [vars(layer) for layer in found.layers]})  # fmt: skip
    macs = {layer.name: layer.multiply_adds for layer in counted.layers}
    rows = []
    for layer in found.layers:
        pace = macs[layer.name] / layer.forward_s / 1e9 if layer.forward_s else 0.0
        cells = (layer.name, layer.kind, words.seconds(layer.forward_s), words.seconds(layer.backward_s), f"{pace:.3g}")
        rows.append([words.plain(cell) for cell in cells])
    echo_table(("layer", "kind", "forward", "backward", "10⁹ multiply-adds a second"), rows, left=("kind",))
    typer.echo(words.plain(
        f"{chosen.name}, {found.batch} samples: forward {words.seconds(found.forward_s)}, backward "
        f"{words.seconds(found.backward_s)}, optimiser {words.seconds(found.optimizer_s)}; steps differ by "
        f"{100 * found.spread:.1f} %" + ("" if found.busy else f"; kept for plans of {found.batch} samples a machine")
    ))  # fmt: skip
    if found.busy:
        typer.echo(UNSURE)
