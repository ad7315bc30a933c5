"""`laconic search`: find the parameters with which a workload, or an objective of one's own, is best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, count_option, echo_json
from laconic.searching import api
from laconic.searching.history import Seen
from laconic.searching.named_spaces import SPACES
from laconic.searching.pruners import REGISTRY as RULES
from laconic.searching.samplers import names
from laconic.searching.spec import SearchSpec
from laconic_lab.commands import run_options as options
from laconic_lab.runs.progress import say
from laconic_lab.searches.report import write_report
from laconic_lab.searches.retrain import check as check_retrain
from laconic_lab.searches.retrain import retrain as train_again


def search(
    context: typer.Context,
    objective: Annotated[str | None, typer.Argument(help="A workload, or module:function.")] = None,
    space: Annotated[str | None, typer.Option(help=f"A .toml file, 'rate = log(0.1, 1)', {', '.join(SPACES)}.")] = None,
    method: Annotated[str, typer.Option(help=f"{', '.join(names())}; with options: evolution(population=30).")] = "tpe",
    trials: Annotated[int | None, typer.Option(help="Number of trials; default 20.")] = None,
    rule: Annotated[str, typer.Option(help=f"Rule for early stopping: {', '.join(RULES.names())}.")] = "none",
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers of each trial.")] = 1,
    parallel: Annotated[int, typer.Option(help="Trials at the same time.")] = 1,
    storage: Annotated[str, typer.Option(help="journal://FILE, postgresql://…, grpc://HOST:PORT.")] = "",
    minimize: Annotated[bool, typer.Option("--minimize", help="Lower is better.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    epochs: options.Epochs = None,
    codec: Annotated[str, typer.Option(help="Codec, unless the space has one.")] = "none",
    link: options.Link = None,
    limit: Annotated[float | None, typer.Option(help="Time limit of a trial, in seconds.")] = None,
    repeats: Annotated[int, count_option("Searches, each with the next seed; reported as a mean.")] = 1,
    retrain: Annotated[int, typer.Option(help="Retrain the best and the default with this many new seeds.")] = 0,
    resume: Annotated[Path | None, typer.Option(help="Resume this search, runs/<id>.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Default: runs/<time>-search-<objective>.")] = None,
    json: Json = False,
) -> None:
    """Search hyper-parameters; after Ctrl-C or a crash, --resume continues from the finished trials."""
    if resume is not None:
        options.refuse_beside_resume(context, "trials", "repeats", "retrain")
    note = _quiet if json else _say
    if retrain:  # before the search, which may take hours
        asked = None if resume is None else SearchSpec.load(resume)
        name, how = (options.named(objective), method) if asked is None else (asked.objective, asked.method)
        check_retrain(name, how, retrain, {})
    try:
        if resume is not None:
            found = api.resume(resume, trials=trials, note=note)
        else:
            own = _objective_options(objective, epochs, codec, link)
            found = api.search(
                options.named(objective), space, method, 20 if trials is None else trials, note=note, rule=rule,
                workers=workers, parallel=parallel, storage=storage, seed=seed, limit_s=limit,
                command=options.command(), maximize=False if minimize else None, folder=folder, **own,
            )  # fmt: skip
        others = api.repeat(found, repeats, note)
    except KeyboardInterrupt:
        say("stopped; what has ended is kept: laconic search --resume FOLDER goes on")
        raise typer.Exit(130) from None
    report = write_report(found, others)
    again = train_again(found, retrain) if retrain else None
    if json:
        values = [each.value for each in (found, *others)]
        return echo_json({**found.to_json(), "repeats": values, "retrained": again, "report": str(report)})
    if found.best is None:
        typer.echo(f"none of {len(found.history)} trials came to its end; report: {report}")
        raise typer.Exit(1)
    typer.echo(f"best of {len(found.history)} trials: {found.value:.6g} by {_words(found.params)}")
    for row in again or []:
        typer.echo(f"{row['what']}: {row['mean']:.4g} over {len(row['values'])} new seeds, report {row['report']}")
    typer.echo(f"report: {report}")


def _objective_options(objective: str | None, epochs: int | None, codec: str, link: str | None) -> dict[str, Any]:
    """What only a search of a workload takes."""
    given = {"epochs": epochs, "codec": codec if codec != "none" else None, "link": link}
    asked = {name: value for name, value in given.items() if value is not None}
    return {"options": asked} if asked else {}


def _words(point: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in point.items())  # fmt: skip


def _quiet(trial: Seen, spec: SearchSpec) -> None: ...


def _say(trial: Seen, spec: SearchSpec) -> None:
    what = trial.why if trial.score is None else f"{spec.sign * trial.score:.6g}"
    say(f"trial {trial.number} {trial.state}: {what}; {_words(trial.point)}; {trial.seconds:.1f} s")
