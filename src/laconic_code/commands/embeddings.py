"""`laconic code graph | embed | analogies`: programs as flow graphs, their statements as vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, Ranks, count_option, echo_json, echo_table, progress_bar
from laconic.storage import files
from laconic_code import analogies as questions
from laconic_code import archives, chart, embedding, embedding_job
from laconic_code import graph as graphs
from laconic_code.drawing import draw
from laconic_code.programs import random_vectors
from laconic_lab.clusters.launch import is_launched, run_job

Prelude = Annotated[Path | None, typer.Option(help="A header to include before every source.")]
Standard = Annotated[str, typer.Option(help="The language's standard, such as gnu++98.")]
Program = Annotated[Path, typer.Argument(help="C, C++ or OpenCL source, .ll or .bc.")]


def graph(
    program: Program,
    output: Annotated[Path | None, typer.Option("-o", help="The SVG. Default: the program's name with .svg.")] = None,
    json: Json = False,
) -> None:
    """Draw the flow graph of a program as SVG: data flow, control flow and calls between its statements."""
    found = graphs.read(program)
    path = files.replace(output or program.with_suffix(".svg"), draw(found, program.name))
    kinds = {name: int((found.edges[:, 2] == kind).sum()) for kind, name in enumerate(graphs.KINDS)}
    functions = len({each.function for each in found.statements if each.function})
    if json:
        return echo_json(
            {
                "program": str(program), "svg": str(path), "functions": functions, "statements": list(found.abstracted),
                "edges": [[source, target, graphs.KINDS[kind]] for source, target, kind in found.edges.tolist()],
            }
        )  # fmt: skip
    edges = ", ".join(f"{count:,} of {name}" for name, count in kinds.items())
    typer.echo(f"{path}: {functions} functions, {len(found):,} statements; edges: {edges}")


def embed(
    paths: Annotated[list[Path], typer.Argument(help="Programs, or folders of them.")],
    output: Annotated[Path, typer.Option("-o", help="The file to write.")] = Path("code.safetensors"),
    distance: Annotated[int, typer.Option(help="Most edges between a statement and its context.")] = 2,
    fan_out: Annotated[
        int, typer.Option(help="Follow at most this many neighbours of a statement, drawn at random by the seed.")
    ] = embedding.FAN_OUT,
    cutoff: Annotated[int, typer.Option(help="Statements that occur less often share one vector.")] = 2,
    dim: Annotated[int, typer.Option(help="Dimension of the embeddings.")] = 200,
    epochs: Annotated[int, typer.Option(help="Passes over the pairs.")] = 5,
    threshold: Annotated[float, typer.Option(help="Subsample statements more frequent than this; 0 keeps all.")] = 0.0,
    seed: Annotated[int, count_option("Seed of all random draws.", least=0)] = 0,
    prelude: Prelude = None,
    std: Standard = "",
    cache: Annotated[Path | None, typer.Option(help="Keep programs and epochs here, to resume from.")] = None,
    ranks: Ranks = 1,
    json: Json = False,
) -> None:
    """Train statement embeddings on programs, from neighbours in the flow graph."""
    how = {
        "distance": distance, "fan_out": fan_out, "cutoff": cutoff, "dim": dim, "epochs": epochs,
        "threshold": threshold, "seed": seed, "prelude": str(prelude) if prelude else None, "standard": std,
    }  # fmt: skip
    given = ([str(path) for path in paths], str(output), how, str(cache) if cache else None)
    if ranks == 1 and not is_launched():
        with progress_bar("programs, then pairs", quiet=json) as progress:
            record: dict[str, Any] | None = embedding_job.embed(*given, progress)
    else:
        record = run_job(ranks, None, embedding_job.embed, given)
    if record is None:  # another rank of a launched job
        return None
    if json:
        return echo_json(record)
    for path, reason in record["skipped"]:
        typer.echo(f"skipped {path}: {reason}", err=True)
    typer.echo(
        f"{output}: {record['vocabulary']:,} statements from {record['programs']:,} programs "
        f"({len(record['skipped'])} skipped), {100 * record['unknown_share']:.1f} % of statements unknown; "
        f"{record['pairs']:,} pairs ({record['hubs']:,} statements with more neighbours than {fan_out}), "
        f"{record['pairs_per_s']:,.0f} a second"
    )


def analogies(
    file: Annotated[Path | None, typer.Argument(help="An embedding. Default: the published one.")] = None,
    near: Annotated[str | None, typer.Option(help="Show the statements nearest to this one.")] = None,
    plane: Annotated[Path | None, typer.Option("--map", help="Write a map of the statements as an HTML page.")] = None,
    asked: Annotated[Path | None, typer.Option("--questions", help="Use the analogy questions of this file.")] = None,
    json: Json = False,
) -> None:
    """Test analogies and distances of an embedding, and compare with the published results."""
    found = archives.published() if file is None else embedding.load(file)
    if plane is not None:
        files.replace(plane, chart.page(found, "published embedding" if file is None else file.name))
        return echo_json({"map": str(plane)}) if json else typer.echo(f"{plane}: a map of the statements")
    if near is not None:
        rows = [[f"{cosine:.3f}", name] for name, cosine in found.nearest(near)]
        return echo_json(rows) if json else echo_table(("cosine", "statement"), rows, left=("statement",))
    if asked is not None:
        answers = questions.asked_from(asked, found)
        cells = [[row["part"], f"{row['correct']}/{row['questions']}", str(row["unknown"])] for row in answers]
        return echo_json(answers) if json else echo_table(("questions", "answered", "not in the vocabulary"), cells)
    return _ask_all(found, json)


def _ask_all(found: embedding.Embedding, json: bool) -> None:
    """All questions, also of random vectors for the same statements."""
    control = embedding.Embedding(found.vocabulary, random_vectors(len(found.vocabulary), found.vectors.shape[1], 0))
    asked, apart = questions.analogies(found), questions.distances(found)
    for row, other in zip(asked, questions.analogies(control), strict=True):
        row["random"] = other["correct"]
    for row, other in zip(apart, questions.distances(control), strict=True):
        row["random"] = other["percent"]
    if json:
        return echo_json({"vocabulary": len(found.vocabulary), "analogies": asked, "distances": apart})
    rows = [[row["kind"], row["part"], f"{row['correct']}/{row['questions']}", str(row["random"]),
             "/".join(map(str, row["published"]))] for row in asked]  # fmt: skip
    echo_table(("kind", "analogy", "answered", "by random vectors", "published"), rows, left=("analogy",))
    cells = [[row["category"], *(f"{row[name]:.2f} %" for name in ("percent", "random", "published"))] for row in apart]
    echo_table(("distances", "nearer", "by random vectors", "published"), cells)
    typer.echo(f"{len(found.vocabulary):,} statements in the vocabulary")
    return None
