"""A mode of blocks whose period and outer steps change during training: {first step: mode}.

Callers: `distribute` makes it, `blocks.py` follows it. What a worker keeps, and how it is cut into fragments, stays the
same, so that only numbers change; they do when a period has ended, at the planned step or after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from laconic.consistency.base import Mode, build
from laconic.errors import BadInput

MAY_CHANGE = ("period", "learning_rate", "momentum")


class ModePlan:
    """The modes of a training by their first steps.

    >>> plan = ModePlan({0: "diloco(20)", 1000: "diloco(200, learning_rate=0.5)"})
    >>> str(plan.at(999)), str(plan.at(1000))
    ('diloco(20)', 'diloco(200, learning_rate=0.5)')

    Raises:
        BadInput: no mode for step 0, or modes that differ in more than MAY_CHANGE.
    """

    def __init__(self, plan: Mapping[int, str | Mode]) -> None:
        if not plan or not all(type(step) is int and step >= 0 for step in plan) or min(plan) != 0:
            raise BadInput("a plan of modes has an entry for step 0, e.g. {0: 'diloco(20)', 1000: 'diloco(100)'}")
        self._table: list[tuple[int, Mode]] = []
        for step, given in sorted(plan.items()):
            mode = given if isinstance(given, Mode) else build(given)
            if not mode.plannable:
                raise BadInput(
                    f"a plan of modes is for those with a period, such as diloco and local, not for '{mode}'"
                )
            self._table.append((step, mode))
        first = self.first
        for _, mode in self._table:
            if type(mode) is not type(first) or _fixed(mode, first) != first:
                text = f"a plan changes {', '.join(MAY_CHANGE)} of one mode"
                raise BadInput(f"{text}, and '{mode}' differs from '{first}' in more")

    @property
    def first(self) -> Mode:
        """The mode that training begins with."""
        return self._table[0][1]

    def at(self, step: int) -> Mode:
        """The mode that is planned for `step`."""
        return next(mode for first, mode in reversed(self._table) if first <= step)

    def named(self, spec: object) -> Mode | None:
        """The mode with this spec, if it is one of the plan's."""
        return next((mode for _, mode in self._table if str(mode) == spec), None)

    def __str__(self) -> str:
        return ", ".join(f"{mode} from step {step}" for step, mode in self._table)


def _fixed(mode: Mode, first: Mode) -> Mode:
    """`mode` with what may change as `first` has it."""
    changed = {each.name: getattr(first, each.name) for each in fields(mode) if each.name in MAY_CHANGE}  # type: ignore[arg-type]
    return replace(mode, **changed)  # type: ignore[type-var]
