"""Prints a schedule so that a person sees who talks to whom, round by round."""

from __future__ import annotations

import numpy as np

from laconic.schedules.schedule import Schedule

MAX_LINES = 64  # a terminal screen or two
MAX_PAIRS = 24  # conversations per round before the rest is counted, not listed


def draw(schedule: Schedule) -> str:
    """One line a round: `0⇄1` is an exchange, `0→1` one way, `+` adds and `=` copies, with the slice that travels."""
    head = (
        f"{schedule.algorithm} {schedule.collective}: {schedule.world_size} ranks, {schedule.numel} values, "
        f"{schedule.rounds} rounds, {len(schedule.messages.round)} messages, {schedule.sent_numel} values sent"
    )
    lines = [head]
    for number in range(schedule.rounds):
        if number == MAX_LINES:
            lines.append(f"… and {schedule.rounds - number} rounds more")
            break
        lines.append(f"round {number + 1:>3}  " + _round(schedule, number))
    return "\n".join(lines)


def _round(schedule: Schedule, number: int) -> str:
    m = schedule.messages
    rows = np.flatnonzero(m.round == number)
    spans: dict[tuple[int, int], list[str]] = {}
    for row in rows.tolist():
        key = (int(m.src[row]), int(m.dst[row]))
        spans.setdefault(key, []).append(f"{'+' if m.add[row] else '='}[{m.start[row]}:{m.stop[row]}]")
    whole = {f"{sign}[0:{schedule.numel}]" for sign in "+="}
    uniform = {tuple(s) for s in spans.values()}
    same = len(uniform) == 1 and next(iter(uniform))[0] in whole
    talks = []
    for (src, dst), slices in sorted(spans.items()):
        back = spans.get((dst, src))
        if back is not None and dst < src:
            continue
        arrow = "⇄" if back is not None else "→"
        text = f"{src}{arrow}{dst}"
        if not same:
            text += "".join(slices) + ("/" + "".join(back) if back is not None and back != slices else "")
        talks.append(text)
    shown = "  ".join(talks[:MAX_PAIRS])
    if len(talks) > MAX_PAIRS:
        shown += f"  … and {len(talks) - MAX_PAIRS} more"
    return shown + (f"   {'adds' if next(iter(uniform))[0][0] == '+' else 'copies'} everything" if same else "")
