"""The search space: a small typed table of parameters, in Python, in TOML or in one line of text.

    [learning_rate]                     learning_rate = log(0.001, 1)
    type = "log"                        mode = choice(['sync', 'local({period})'])
    low = 0.001                         period = int(1, 16) when mode = local({period})
    high = 1.0

Callers: samplers, which draw points and move them; the search, which checks that what a sampler proposes is in the
space. Optuna's distributions have no way to move a value, and no condition under which a parameter is there.
A point holds the parameters that are active: one with `when` is there only where an earlier choice has one of the named
values. Invariant: every point that `draw`, `at` or `moved` gives is `checked`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from laconic import specs
from laconic.errors import BadInput
from laconic.searching.parameters import KINDS, Choice, Float, Int, Parameter, Value, times

Point = dict[str, Any]
MOST_POINTS = 1_000_000  # a grid of more is refused


@dataclass(frozen=True)
class Space:
    """Parameters by name, and the condition under which each is active.

    >>> text = "rate = log(0.001, 1); mode = choice(['sync', 'local']); period = int(1, 4) when mode = local"
    >>> space = Space.read(text)
    >>> space.checked({"rate": 0.1, "mode": "sync"})
    {'rate': 0.1, 'mode': 'sync'}

    Attributes:
        parameters: in the order in which they are decided.
        when: for a parameter that is not always there, {earlier choice: values with which it is}.
    """

    parameters: Mapping[str, Parameter]
    when: Mapping[str, Mapping[str, Sequence[Value]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parameters:
            raise BadInput("the space is empty: name at least one parameter, such as learning_rate = log(0.001, 1)")
        names = list(self.parameters)
        for name, conditions in self.when.items():
            for other, values in conditions.items():
                earlier = names[: names.index(name)] if name in names else []
                if other not in earlier:
                    raise BadInput(f"'{name}' is there when '{other}' says so, which must be a parameter before it")
                if wrong := [value for value in values if not self.parameters[other].has(value)]:
                    raise BadInput(f"'{name}' is there when {other} = {wrong[0]!r}, which {other} can never be")

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any] | Space) -> Space:
        """A space from a TOML file, a line of text, or a table in Python.

        Raises:
            BadInput: it is none; the sentence names the parameter.
        """
        if isinstance(source, Space):
            return source
        if isinstance(source, Mapping):
            return cls._of_table(source)
        if isinstance(source, Path) or str(source).endswith(".toml"):
            try:
                return cls._of_table(tomllib.loads(Path(source).read_text()))
            except (OSError, UnicodeDecodeError) as error:
                raise BadInput(f"the space {source} cannot be read: {error}") from error
            except tomllib.TOMLDecodeError as error:
                raise BadInput(f"the space {source} is no TOML: {error}") from error
        return cls._of_text(source)

    @classmethod
    def _of_table(cls, table: Mapping[str, Any]) -> Space:
        parameters, when = {}, {}
        for name, row in table.items():
            if isinstance(row, Parameter):
                parameters[name] = row
                continue
            if not isinstance(row, Mapping) or not isinstance(row.get("type"), str):
                raise BadInput(f"parameter '{name}' needs a type: {', '.join(KINDS.names())}")
            if not isinstance(row.get("when", {}), Mapping):
                raise BadInput(f"parameter '{name}': when is a table such as {{ mode = 'local' }}, got {row['when']!r}")
            given = {key: value for key, value in row.items() if key not in ("type", "when")}
            with _about(name):
                kind = KINDS.get(row["type"])
                try:
                    parameters[name] = kind(**given)
                except TypeError as error:
                    raise BadInput(f"{error}") from error
            if "when" in row:
                when[name] = {key: tuple(_listed(value)) for key, value in row["when"].items()}
        return cls(parameters, when)

    @classmethod
    def _of_text(cls, text: str) -> Space:
        parameters, when = {}, {}
        for line in (part.strip() for part in text.replace("\n", ";").split(";")):
            if not line:
                continue
            name, equals, rest = line.partition("=")
            kind, _, condition = rest.partition(" when ")
            name = name.strip()
            if not equals or not name:
                raise BadInput(f"a space is a .toml file, or lines such as rate = log(0.001, 1), got '{line}'")
            with _about(name):
                parameters[name] = specs.build(KINDS, kind.strip())
            if condition:
                other, _, values = condition.partition("=")
                known = {str(value): value for value in getattr(parameters.get(other.strip()), "values", ())}
                when[name] = {other.strip(): tuple(known.get(v.strip(), v.strip()) for v in values.split("|"))}
        return cls(parameters, when)

    def to_table(self) -> dict[str, Any]:
        """The table that `read` makes an equal space of, for records."""
        kinds = {Float: "float", Int: "int", Choice: "choice"}
        rows = {}
        for name, each in self.parameters.items():
            values = {part.name: getattr(each, part.name) for part in fields(each)}
            plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
            rows[name] = {"type": kinds[type(each)], **plain}
            if name in self.when:
                rows[name]["when"] = {key: list(value) for key, value in self.when[name].items()}
        return rows

    def is_active(self, name: str, point: Mapping[str, Any]) -> bool:
        """Whether a parameter is active, given the earlier choices."""
        return all(other in point and times(point[other], values) for other, values in self.when.get(name, {}).items())

    def build(self, choose: Any) -> Point:
        """The point of `choose(name, parameter)` for each active parameter, in order."""
        point: Point = {}
        for name, each in self.parameters.items():
            if self.is_active(name, point):
                point[name] = choose(name, each)
        return point

    def draw(self, chance: np.random.Generator) -> Point:
        """A point by chance."""
        return self.build(lambda name, each: each.draw(chance))

    def at(self, places: Sequence[float]) -> Point:
        """The point at places in [0, 1), one for each parameter, active or not."""
        known = dict(zip(self.parameters, places, strict=True))
        return self.build(lambda name, each: each.at(known[name]))

    def places(self, point: Mapping[str, Any]) -> list[float]:
        """The places of a point; the middle for a parameter that is not active."""
        return [each.place(point[name]) if name in point else 0.5 for name, each in self.parameters.items()]

    def moved(self, point: Mapping[str, Any], names: Sequence[str], chance: np.random.Generator) -> Point:
        """The point with the named parameters moved; those that become active are drawn."""
        def choose(name: str, each: Parameter) -> Value:
            if name not in point:
                return each.draw(chance)
            value: Value = point[name]
            return each.moved(value, chance) if name in names else value

        return self.build(choose)

    def checked(self, point: Mapping[str, Any]) -> Point:
        """The point, if it is one of this space.

        Raises:
            BadInput: a value outside, missing or too many.
        """
        def choose(name: str, each: Parameter) -> Value:
            if name not in point:
                raise BadInput(f"the point has no '{name}'")
            value: Value = point[name]
            if not each.has(value):
                raise BadInput(f"{name} = {value!r} is not in {each}")
            return value

        built = self.build(choose)
        if extra := point.keys() - built.keys():
            raise BadInput(f"'{min(extra)}' is not active in this point, or no parameter of the space")
        return built

    @property
    def size(self) -> int | None:
        """How many points there are; None where one parameter is continuous, or where they are too many to count."""
        counts = [each.count for each in self.parameters.values()]
        if any(count is None for count in counts) or math.prod(c or 1 for c in counts) > MOST_POINTS:
            return None
        return sum(1 for _ in self.points()) if self.when else math.prod(c or 1 for c in counts)

    def points(self, levels: int = 5) -> Iterator[Point]:
        """Every point, in order; continuous parameters at so many levels."""
        counts = [each.count or levels for each in self.parameters.values()]
        if math.prod(counts) > MOST_POINTS:
            raise BadInput(f"a grid of {math.prod(counts):,} points is too large; most are {MOST_POINTS:,}")
        seen: set[tuple[Any, ...]] = set()
        for numbers in itertools.product(*map(range, counts)):
            point = self.at([self._level(each, i, n) for each, i, n in
                             zip(self.parameters.values(), numbers, counts, strict=True)])  # fmt: skip
            if not self.when:
                yield point
            elif (key := key_of(point)) not in seen:
                seen.add(key)
                yield point

    @staticmethod
    def _level(each: Parameter, number: int, count: int) -> float:
        if each.count is not None:
            return (number + 0.5) / count
        return 0.5 if count == 1 else number / (count - 1)  # both ends are levels


def key_of(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that is equal for equal points only."""
    return tuple((name, type(value).__name__, value) for name, value in sorted(point.items()))


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """Name the parameter in a BadInput of the block."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"parameter '{name}': {error}") from error


def _listed(value: Any) -> Sequence[Value]:
    return value if isinstance(value, list | tuple) else [value]
