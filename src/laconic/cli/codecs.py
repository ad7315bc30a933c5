"""`laconic codecs`: what can be sent, how small, how true, and who published it.

The list follows from the codecs' source alone. It is made once, which takes torch and seconds, and then read from the
user's cache folder, under the checksum of that source.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.errors import PayloadError, StorageError
from laconic.storage import files, json_text

HEADINGS = ("codec", "per element", "bias", "rounding", "source", "what it does")
NUMEL = 1_000_000  # bits per element are those of a tensor of this length, header and scales included
SOURCE = Path(__file__).parents[1] / "codecs"


def codecs(json: Json = False) -> None:
    """List every codec: bits per element, bias, stochastic or not, source paper, one line on what it does."""
    entries = listed()
    if json:
        echo_json({"codecs": entries})
    else:
        echo_table(HEADINGS, [_cells(entry) for entry in entries], left=HEADINGS[2:], named=False)


def listed() -> list[dict[str, Any]]:
    """What a user must know of every codec."""
    source = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        source.update(path.read_bytes())
    kept = files.cache_folder() / f"codecs-{source.hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, PayloadError):  # not made yet, or damaged
        entries: list[dict[str, Any]] = json_text.unseal(kept.read_bytes())["codecs"]
        return entries
    entries = _made()
    with contextlib.suppress(StorageError):
        files.replace(kept, json_text.seal({"codecs": entries}))
    return entries


def _made() -> list[dict[str, Any]]:
    """The list; a matrix or lossless codec has no size of its own for a flat vector."""
    from laconic.codecs import codec, get, names
    from laconic.lab.bench.codec_speed import simplest_spec

    entries = []
    for name in names():
        cls = get(name)
        built = codec(simplest_spec(name)) if cls.kind in ("quantiser", "selector") else None
        entry = {
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
        entries.append(entry)
    return entries


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
