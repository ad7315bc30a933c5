"""`laconic codecs`: list the codecs with size, accuracy and source."""

from __future__ import annotations

from typing import Any

from laconic.cli.catalogue import catalogue
from laconic.cli.shared import Json, echo_json, echo_table

HEADINGS = ("codec", "per element", "bias", "rounding", "source", "what it does")


def codecs(json: Json = False) -> None:
    """List every codec: bits per element, bias, stochastic or not, source paper, one line on what it does."""
    entries = catalogue()["codecs"]
    if json:
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
