"""`laconic codecs`: what can be sent, how small, how true, and who published it."""

from __future__ import annotations

from typing import Any

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.codecs import codec, get, names
from laconic.lab.bench.codec_speed import simplest_spec

HEADINGS = ("codec", "per element", "bias", "rounding", "source", "what it does")
NUMEL = 1_000_000  # bits per element are those of a tensor of this length, header and scales included


def codecs(json: Json = False) -> None:
    """List every codec: bits per element, bias, stochastic or not, source paper, one line on what it does."""
    entries = [_entry(name) for name in names()]
    if json:
        echo_json({"codecs": entries})
    else:
        echo_table(HEADINGS, [_cells(entry) for entry in entries], left=HEADINGS[2:], named=False)


def _entry(name: str) -> dict[str, Any]:
    """What a user must know of one codec; a matrix or lossless codec has no size of its own for a flat vector."""
    cls = get(name)
    built = codec(simplest_spec(name)) if cls.kind in ("quantiser", "selector") else None
    return {
        "name": name,
        "spec": str(built) if built is not None else name,
        "kind": cls.kind,
        "bits_per_element": 8 * built.max_nbytes(NUMEL) / NUMEL if built is not None else None,
        "fixed_size": (built or cls).fixed_size,
        "unbiased": (built or cls).unbiased is True,
        "stochastic": (built or cls).stochastic is True,
        "source": cls.source,
        "summary": cls.summary,
    }


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
