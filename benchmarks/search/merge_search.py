"""Join pieces of `search --json` of other seeds or parts.

    python -m benchmarks merge-search OUT PIECE…

Rows of the same space and method become one, with all their values, a new mean, interval and test.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.search.methods_on_tables import mean
from laconic.statistics import sign_permutation


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several that differ by their seeds."""
    first = rows[0]
    if "bests" not in first or len({row.get("first_seed", 0) for row in rows}) < len(rows):
        return first
    bests = [best for row in rows for best in row["bests"]]
    row = {**first, "repeats": len(bests), **mean(bests), "bests": bests}
    row.pop("deviation", None)
    if "optimum_found_rate" in row:
        row["optimum_found_rate"] = sum(best >= row["optimum"] - 1e-6 for best in bests) / len(bests)
    if "seconds" in row:
        row["seconds"] = sum(each["seconds"] for each in rows)
    return row


def merge(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for piece in pieces:
        for row in piece["results"]:
            groups.setdefault((row["space"], row["method"]), []).append(row)
    results = [joined(sorted(rows, key=lambda row: row.get("first_seed", 0))) for rows in groups.values()]
    for row in results:
        if "p_value" in row:
            other = next(each for each in results if each["space"] == row["space"] and each["method"] == "random")
            row["p_value"] = sign_permutation([a - b for a, b in zip(row["bests"], other["bests"], strict=True)])
    return {"environment": pieces[0]["environment"], "pieces": [piece["configuration"] for piece in pieces],
            "results": results}  # fmt: skip


def main() -> None:
    """Write one record of several."""
    out, *names = sys.argv[1:]
    Path(out).write_text(json.dumps(merge([json.loads(Path(name).read_text()) for name in names]), indent=1) + "\n")
