"""The kinds of parameters that a space has: numbers, whole numbers, choices.

Callers: spaces and samplers. Each is a distribution of Optuna's, to which it adds how a value is moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from laconic.errors import BadInput, MissingExtra
from laconic.registry import Registry

try:
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
except ImportError as error:
    raise MissingExtra("optuna", "search") from error

Value = str | int | float | bool | None
KINDS: Registry[type[Parameter]] = Registry("kind of parameter")


@dataclass(frozen=True)
class Parameter:
    """One parameter; a value is a place in [0, 1) to the samplers that only know numbers."""

    @property
    def distribution(self) -> BaseDistribution:
        """The distribution of Optuna's that it corresponds to."""
        raise NotImplementedError

    @property
    def count(self) -> int | None:
        """How many values it has; None for a continuous one."""
        raise NotImplementedError

    def at(self, place: float) -> Value:
        """The value at a place in [0, 1)."""
        raise NotImplementedError

    def place(self, value: Value) -> float:
        """The reverse of `at`: the middle of the places that give this value."""
        raise NotImplementedError

    def has(self, value: Any) -> bool:
        """Whether it is one of the values."""
        raise NotImplementedError

    def draw(self, chance: np.random.Generator) -> Value:
        """Draw a value, uniform over places."""
        return self.at(float(chance.random()))

    def moved(self, value: Value, chance: np.random.Generator, far: float = 0.2) -> Value:
        """Another value: a nearby one if values are ordered, else any other."""
        if self.count == 1:
            return value
        place = self.place(value)
        for _ in range(64):
            other = self.at(min(max(place + far * float(chance.standard_normal()), 0.0), 1 - 1e-12))
            if other != value:
                return other
        return self.draw(chance)


@KINDS.register("float")
@dataclass(frozen=True)
class Float(Parameter):
    """A number from `low` to `high`, in steps if there are any; with `log` each factor is as likely."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _check_range(self, self.log)
        if self.step is None:
            return
        if self.log or isinstance(self.step, bool) or not 0 < self.step < math.inf:
            raise BadInput(f"a step is a number above 0, without log, got {self}")
        if (self.high - self.low) / self.step > 1 << 53:
            raise BadInput(f"a step of so many that a float cannot tell them apart: leave it out, got {self}")

    @property
    def distribution(self) -> FloatDistribution:
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    @property
    def count(self) -> int | None:
        return None if self.step is None else int((self.high - self.low) / self.step + 1e-8) + 1

    def at(self, place: float) -> float:
        if self.count is not None and self.step is not None:
            return self.low + self.step * min(int(place * self.count), self.count - 1)
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + place * (high - low)
        return float(min(max(math.exp(value) if self.log else value, self.low), self.high))

    def place(self, value: Value) -> float:
        low, high, at = float(self.low), float(self.high), float(value or 0.0)
        if self.count is not None and self.step is not None:
            return (round((at - low) / self.step) + 0.5) / self.count
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return 0.0 if high == low else (at - low) / (high - low)

    def has(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and (self.step is None or self.distribution._contains(value))


@KINDS.register("log")
def _log(low: float, high: float) -> Float:
    """A number from `low` to `high`, each factor being as likely."""
    return Float(low, high, log=True)


@KINDS.register("int")
@dataclass(frozen=True)
class Int(Parameter):
    """A whole number from `low` to `high`, in steps; with `log` each factor is as likely, about."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self, self.log)
        if not all(isinstance(each, int) for each in (self.low, self.high, self.step)) or self.step < 1:
            raise BadInput(f"an int has whole numbers and a step of 1 or more, got {self}")
        if self.log and self.step != 1:
            raise BadInput(f"an int with log has a step of 1, got {self}")

    @property
    def distribution(self) -> IntDistribution:
        return IntDistribution(self.low, self.high, log=self.log, step=self.step)

    @property
    def count(self) -> int:
        return (self.high - self.low) // self.step + 1

    def at(self, place: float) -> int:
        if self.log:
            return min(max(round(self._scale.at(place)), self.low), self.high)
        return self.low + self.step * min(int(place * self.count), self.count - 1)

    def place(self, value: Value) -> float:
        if self.log:
            return self._scale.place(value)
        return ((int(value or 0) - self.low) // self.step + 0.5) / self.count

    @property
    def _scale(self) -> Float:
        """Where every number has as much room around it as to the next ones."""
        return Float(self.low - 0.5, self.high + 0.5, log=True)

    def has(self, value: Any) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0


@KINDS.register("choice")
@dataclass(frozen=True)
class Choice(Parameter):
    """One of several values without an order."""

    values: Sequence[Value]

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple) or not self.values:
            raise BadInput(f"a choice needs at least one value, such as choice(['a', 'b']), got {self.values!r}")
        if wrong := [each for each in self.values if not isinstance(each, str | int | float | bool | None)]:
            raise BadInput(f"a choice is among words, numbers, true and false, got {wrong[0]!r}")
        if twice := [each for each in self.values if times(each, self.values) > 1]:
            raise BadInput(f"a choice names {twice[0]!r} twice")
        object.__setattr__(self, "values", tuple(self.values))

    @property
    def distribution(self) -> CategoricalDistribution:
        return CategoricalDistribution(list(self.values))

    @property
    def count(self) -> int:
        return len(self.values)

    def at(self, place: float) -> Value:
        return self.values[min(int(place * self.count), self.count - 1)]

    def place(self, value: Value) -> float:
        return (self.values.index(value) + 0.5) / self.count

    def has(self, value: Any) -> bool:
        return times(value, self.values) == 1

    def moved(self, value: Value, chance: np.random.Generator, far: float = 0.2) -> Value:
        others = [each for each in self.values if each != value]
        return others[int(chance.integers(len(others)))] if others else value


def parameter_of(distribution: BaseDistribution) -> Parameter:
    """The parameter of a distribution of Optuna's.

    Raises:
        BadInput: it is a choice among things that are no words or numbers.
    """
    if isinstance(distribution, FloatDistribution):
        return Float(distribution.low, distribution.high, distribution.log, distribution.step)
    if isinstance(distribution, IntDistribution):
        return Int(distribution.low, distribution.high, distribution.step, distribution.log)
    assert isinstance(distribution, CategoricalDistribution)
    return Choice(distribution.choices)


def times(value: Any, values: Sequence[Value]) -> int:
    """How often a value is among others; true is not 1."""
    return sum(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _check_range(each: Float | Int, log: bool) -> None:
    numbers = (each.low, each.high)
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers):
        raise BadInput(f"low and high are numbers, got {each.low!r} and {each.high!r}")
    if each.low > each.high:
        raise BadInput(f"low is above high: {each.low} > {each.high}")
    if log and each.low <= 0:
        raise BadInput(f"with log, low is above 0, got {each.low}")
