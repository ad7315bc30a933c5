"""`laconic bench codecs | collectives | memory`: measure, check, tabulate."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic.cli.shared import Engine, Json, Ranks, amount_option, count_option, echo_json, echo_table, progress_bar
from laconic.errors import BadInput
from laconic_lab.bench import codec_speed
from laconic_lab.bench import collectives as collectives_lab
from laconic_lab.bench import memory as memory_lab
from laconic_lab.clusters.launch import run_job


def codecs(
    numel: Annotated[int, typer.Option(help="Elements of the tensor.")] = codec_speed.NUMEL,
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed repeats, after one untimed.")] = 9,
    codec: Annotated[list[str] | None, typer.Option(help="A codec spec; repeat it for more. Default: all.")] = None,
    peers: Annotated[bool, typer.Option(help="Also measure other packages.")] = True,
    json: Json = False,
) -> None:
    """Time every codec on N(0,1) values, and compare with memcpy and other packages."""
    with progress_bar("codecs", quiet=json) as progress:
        record = codec_speed.run(
            codec or None, numel=numel, threads=threads, repeats=repeats, peers=peers, progress=progress
        )
    if json:
        return echo_json(record)
    headings = ["codec", *codec_speed.OPERATIONS, "bits", "mean rel. error", "mean abs. error"]
    echo_table(headings, [_codec_cells(row) for row in [*record["results"], *record["peers"]]])
    typer.echo(f"ns per element (multiple of memcpy); memcpy of {numel:,} floats: {record['memcpy_ns']:.3f} ns")


def _codec_cells(row: dict[str, Any]) -> list[str]:
    if "codec" not in row and "encode_ns" not in row:
        return [row["peer"], row.get("error", "not installed"), *[""] * 6]
    times = [f"{row[f'{name}_ns']:.3f} ({row[f'{name}_ratio']:.2f}×)" if f"{name}_ns" in row else ""
             for name in codec_speed.OPERATIONS]  # fmt: skip
    errors = [f"{row[key]:.3g}" if key in row else "" for key in ("mean_rel_error", "mean_abs_error")]
    return [row.get("codec") or f"peer: {row['peer']}", *times, f"{row['bits_per_element']:.3f}", *errors]


def collectives(
    ranks: Ranks = 4,
    engine: Engine = None,
    numels: Annotated[str | None, typer.Option(help="Sizes, e.g. 100,1e4,1e6; default 1e2 to 1e7.")] = None,
    seconds: Annotated[float, amount_option("Time to spend on each size.")] = 4.0,
    quick_probe: Annotated[bool, typer.Option("--quick-probe", help="Let auto choose from a short probe.")] = (
        False
    ),
    json: Json = False,
) -> None:
    """Measure every all-reduce algorithm and the engine's own, and check auto's choice after a fresh probe."""
    sizes = list(collectives_lab.NUMELS) if numels is None else _sizes(numels)
    record = run_job(ranks, engine, collectives_lab.measure, (sizes, seconds, quick_probe), timeout_s=3600)
    if record is None:
        return
    if json:
        return echo_json(record)
    fit = f"fit residual {100 * record['fit_relative_rms']:.0f} %"
    typer.echo(f"{record['engine']}, {record['world_size']} ranks; {fit}")
    headings = ["algorithm", "numel", "measured", "predicted", "model", "sent", "rounds"]
    echo_table(headings, [_collective_cells(row) for row in record["results"]])
    for pick in record["auto"]:
        native = "" if pick["ratio_to_native"] is None else f", {pick['ratio_to_native']:.2f} × native"
        best = f"{pick['ratio_to_best']:.2f} × the best, {pick['best']}{native}"
        typer.echo(f"auto at {pick['numel']}: {pick['pick']} ({best})")


def _collective_cells(row: dict[str, Any]) -> list[str]:
    times = [row[name] for name in ("seconds", "predicted_seconds", "model_seconds")]
    shown = ["" if seconds is None else f"{seconds * 1e3:.3f} ms" for seconds in times]
    sent = "" if row["sent_nbytes"] is None else str(row["sent_nbytes"])
    return [row["algorithm"], str(row["numel"]), *shown, sent, str(row["rounds"] or "")]


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(float(part)) for part in text.split(",")]
    except (ValueError, OverflowError) as error:
        raise BadInput(f"--numels '{text}': expected numbers with commas, such as 100,1e4,1e6") from error
    if any(size < 1 for size in sizes):
        raise BadInput(f"--numels '{text}': every size must be at least 1")
    return sizes


def memory(
    codec: Annotated[list[str] | None, typer.Option(help="A codec spec; repeat it for more.")] = None,
    ranks: Annotated[int, count_option("Local ranks.", "-n", "--ranks")] = 2,
    width: Annotated[int, count_option("Inputs and outputs of each layer.")] = 4096,
    layers: Annotated[int, count_option("Linear layers.")] = 3,
    json: Json = False,
) -> None:
    """Compare the peak memory of a rank under DDP, compress and distribute."""
    record = memory_lab.run(codec or ["dynamic8", "topk(0.01)"], width, layers, ranks)
    if json:
        return echo_json(record)
    rows = record["results"]
    typer.echo(f"{rows[0]['gradient_nbytes'] / 1e6:.0f} MB of gradients, {ranks} ranks")
    headings = ["way", "codec", "peak", "beyond DDP", "gradients beyond DDP", "step"]
    echo_table(headings, [_memory_cells(row, rows[0]["peak_nbytes"]) for row in rows], left=["codec"])


def _memory_cells(row: dict[str, Any], ddp_nbytes: int) -> list[str]:
    beyond = row["peak_nbytes"] - ddp_nbytes
    shares = [f"{beyond / 1e6:+.0f} MB", f"{beyond / row['gradient_nbytes']:+.2f}"]
    return [row["way"], row["codec"], f"{row['peak_nbytes'] / 1e6:.0f} MB", *shares, f"{1e3 * row['step_s']:.0f} ms"]
