"""`laconic bench networks`: forward and gradient checks of the laboratory's networks, and how long a batch takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from laconic.cli.tables import echo_json
from laconic.lab.bench.networks import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, Checked, check, small_names


def networks(
    names: Annotated[list[str] | None, typer.Argument(help="Networks; default: those with small inputs.")] = None,
    batch: Annotated[int, typer.Option(help="Samples.")] = 4,
    directions: Annotated[int, typer.Option(help="Random directions to differentiate along.")] = 2,
    repeats: Annotated[int, typer.Option(help="Of the timing.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check networks against float64 and against differences of their loss, and time them, on one thread."""
    import torch

    torch.set_num_threads(1)
    found = [check(name, batch, directions, repeats) for name in names or small_names()]
    if json:
        rows = [{**asdict(each), "passed": each.passed} for each in found]
        echo_json({"results": rows})
    else:
        for line in table(found):
            typer.echo(line)
    if not all(each.passed for each in found):
        raise typer.Exit(1)


def table(found: list[Checked]) -> list[str]:
    """One line a network."""
    head = ("parameters", "forward error", "gradient error", "forward", "backward")
    lines = [
        f"tolerances: forward {FORWARD_TOLERANCE:g}, gradient {GRADIENT_TOLERANCE:g}, both relative",
        f"{'network':<18}" + "".join(f"{title:>16}" for title in head),
    ]
    for each in found:
        cells = (
            f"{each.parameters:,}", f"{each.forward_error:.1e}", f"{each.gradient_error:.1e}",
            f"{1e3 * each.forward_seconds:.2f} ms", f"{1e3 * each.backward_seconds:.2f} ms",
        )  # fmt: skip
        fails = "" if each.passed else "  FAILS"
        lines.append(f"{each.name:<18}" + "".join(f"{cell:>16}" for cell in cells) + fails)
    return lines
