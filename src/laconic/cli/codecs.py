"""`laconic codecs`: list the codecs with size, accuracy and source."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic.cli.catalogue import catalogue
from laconic.cli.shared import Json, echo_json, echo_table
from laconic.errors import UnknownName
from laconic.text_table import aligned

HEADINGS = ("codec", "per element", "bias", "rounding", "source", "what it does")


def codecs(
    name: Annotated[str | None, typer.Argument(help="One codec to explain.")] = None, json: Json = False
) -> None:
    """List every codec, or explain one: bits per element, bias, rounding, source, options, what it does."""
    entries = catalogue()["codecs"]
    if name is not None:
        found = next((entry for entry in entries if entry["name"] == name.partition("(")[0]), None)
        if found is None:
            raise UnknownName("codec", name, [entry["name"] for entry in entries])
        if json:
            return echo_json(found)
        cells = zip(HEADINGS, _cells(found), strict=True)
        options = [("options", ", ".join(found["options"]) or "none")]
        lines = [*cells, *options, ("in a script", f'laconic.compress(ddp, "{found["spec"]}")')]
        typer.echo("\n".join(aligned([[f"{word}:", text] for word, text in lines], left=(0, 1))))
    elif json:
        echo_json({"codecs": entries})
    else:
        echo_table(HEADINGS, [_cells(entry) for entry in entries], left=HEADINGS[2:], named=False)


def _cells(entry: dict[str, Any]) -> list[str]:
    bits = entry["bits_per_element"]
    return [
        entry["spec"],
        entry["kind"] if bits is None else f"{'' if entry['fixed_size'] else '≤ '}{bits:.3g} bits",
        "exact" if entry["kind"] == "lossless" else "unbiased" if entry["unbiased"] else "biased",
        "stochastic" if entry["stochastic"] else "deterministic",
        entry["source"],
        entry["summary"],
    ]
