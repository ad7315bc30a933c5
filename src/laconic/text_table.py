"""Tables as plain text, for what prints itself: plans, predictions, reports.

Callers: `__str__` methods and commands whose lines are read by people and by `grep`; `cli/shared.py` draws the tables
of a terminal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """One line a row; columns in `left` begin at the same place, all others end at one.

    A row with fewer cells than the first ends in a sentence, which widens no column.

    >>> print("\\n".join(aligned([["name", "bytes"], ["a", "1,000"], ["longer", "20"]])))
    name    bytes
    a       1,000
    longer     20
    """
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in whole) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if column in left else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=False))).rstrip()
        for row in rows
    ]  # fmt: skip
