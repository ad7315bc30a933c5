"""Our own goals for codecs' speed, as multiples of memcpy, beside what this machine measures.

    python -m benchmarks codec-targets            # ends with code 1 if one is missed
    python -m benchmarks codec-targets --json
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic import codecs
from laconic.cli.shared import Json, echo_json, progress_bar
from laconic_lab.bench import codec_speed

# Of NUMEL values or more: by spec and operation.
TARGETS: dict[str, dict[str, float]] = {
    "fp16": {"encode": 1.5, "decode_add": 1.5},
    "linear8": {"encode": 1.5, "decode_add": 1.5},
    "dynamic8": {"encode": 2.5, "decode_add": 1.5},
    "qsgd(4)": {"encode": 4.0, "decode_add": 2.0},
    "int4": {"encode": 4.0, "decode_add": 2.0},
    "fp4": {"encode": 4.0, "decode_add": 2.0},
    "int2": {"encode": 4.0, "decode_add": 2.0},
    "hadamard+int4": {"encode": 4.0, "decode_add": 2.0},
    "ternary": {"encode": 4.0, "decode_add": 2.0},
    "linear8(stochastic=true)": {"encode": 4.0, "decode_add": 2.0},
    "onebit": {"encode_feedback": 3.0, "decode_add": 1.5},
    "topk(0.01)": {"encode_feedback": 6.0, "decode_add": 1.0},
}


def main(
    numel: Annotated[int, typer.Option(help="Elements of the tensor.")] = codec_speed.NUMEL,
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed repeats, after one untimed.")] = 9,
    json: Json = False,
) -> None:
    """Measure the codecs that have goals, and say which are missed."""
    with progress_bar("codecs", quiet=json) as progress:
        record = codec_speed.run(list(TARGETS), numel=numel, threads=threads, repeats=repeats, peers=False,
                                 progress=progress)  # fmt: skip
    missed = missed_targets(record)
    if json:
        return echo_json({**record, "targets": TARGETS, "missed": missed})
    for sentence in missed or ["all goals are met"]:
        typer.echo(sentence)
    if missed:
        raise typer.Exit(1)


def missed_targets(record: dict[str, Any]) -> list[str]:
    """A sentence for each goal that a record of `codec_speed.run` does not meet.

    >>> missed_targets({"results": [{"codec": "fp16", "encode_ratio": 2.0}]})
    ['fp16 encode: 2.00 × memcpy, goal 1.50']
    """
    goals = {str(codecs.codec(spec)): each for spec, each in TARGETS.items()}
    return [
        f"{row['codec']} {operation}: {row[f'{operation}_ratio']:.2f} × memcpy, goal {goal:.2f}"
        for row in record["results"]
        for operation, goal in goals.get(row["codec"], {}).items()
        if row.get(f"{operation}_ratio", 0.0) > goal
    ]
