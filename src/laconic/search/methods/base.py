"""What a method is: a frozen dataclass that proposes the next point from the history and chance alone.

Callers: the loop, and the benchmark on tables. To add a method, add a file with `@register(name)`: the conformance
suite then runs over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from laconic import specs
from laconic.errors import BadInput
from laconic.registry import Registry
from laconic.search.history import History, Proposal
from laconic.search.space import Choice, Space

REGISTRY: Registry[type[Method]] = Registry("search method")
register = REGISTRY.register
names = REGISTRY.names
Chance = np.random.Generator


class Method(ABC):
    """A way of searching.

    Attributes:
        inherits: its trials begin with the weights of others.
        trains: its trials train; else they only evaluate the weights they are given.
        schedules: what it finds is a schedule, the parameters of one stretch after the other.
        repeats: it may ask for a point again, since chance or weights differ.
        draws: how often it is asked again when its point is known already.
        rule: the rule of early stopping that is part of it.
    """

    name: ClassVar[str]
    inherits: ClassVar[bool] = False
    trains: ClassVar[bool] = True
    schedules: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    draws: ClassVar[int] = 20
    rule: str = "none"

    def check(self, space: Space) -> None:
        """Refuse a space that it cannot search.

        Raises:
            BadInput: the sentence says which parameter is in the way.
        """
        return

    @abstractmethod
    def propose(self, space: Space, history: History, chance: Chance) -> Proposal | None:
        """The next trial; None while it has to wait for one under way, or has nothing left to try."""

    def __str__(self) -> str:
        return specs.spec_of(self)


def build(spec: str | Method) -> Method:
    """The method that a spec names, such as `evolution(population=30)`.

    Raises:
        UnknownName: no such method; the valid ones are listed.
        BadInput: arguments it does not take.
    """
    return spec if isinstance(spec, Method) else specs.build(REGISTRY, spec)


def need_choices(method: Method, space: Space) -> None:
    """Refuse a space with anything but choices.

    Raises:
        BadInput: a parameter is a number.
    """
    for name, each in space.parameters.items():
        if not isinstance(each, Choice):
            raise BadInput(f"method '{method.name}' searches choices only; '{name}' is a number")


def need(condition: bool, sentence: str) -> None:
    """Raise BadInput with a sentence unless the condition holds."""
    if not condition:
        raise BadInput(sentence)
