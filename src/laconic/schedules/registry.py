"""Which algorithms there are: `@algorithm(...)` beside a builder is all it takes to be listed, tested and picked.

Callers: `auto`, the command line, the conformance suite. An entry holds the builder and its closed forms.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec

from laconic.errors import BadInput, UnknownName
from laconic.registry import Discovery, Registry, summary_of
from laconic.schedules.link import Link
from laconic.schedules.schedule import Schedule, check_sizes

P = ParamSpec("P")
MOST_DENSE_RANKS = 4096  # 2 · 4096² messages are 2 GB of columns
_REGISTRIES: dict[str, Registry[Algorithm]] = {}  # by collective
_find = Discovery("laconic.schedules")  # an algorithm is known as soon as its file exists


@dataclass(frozen=True)
class Algorithm:
    """A builder of schedules with what it will cost.

    Attributes:
        build: (world_size, numel, **parameters) -> Schedule.
        rounds: (world_size, **parameters) -> rounds for numel ≥ 1 (an empty buffer takes none).
        sent_numel: (world_size, numel, **parameters) -> values sent by all ranks together.
        seconds: (world_size, nbytes, link, **parameters) -> closed-form LogGP time.
        summary: first line of the builder's docstring.
        dense: it has about P² messages, which cannot be written down for very many ranks.
    """

    collective: str
    name: str
    build: Callable[..., Schedule]
    rounds: Callable[..., int]
    sent_numel: Callable[..., int]
    seconds: Callable[..., float]
    summary: str
    dense: bool = False


def algorithm(
    name: str,
    collective: str,
    *,
    rounds: Callable[..., int],
    sent_numel: Callable[..., int],
    seconds: Callable[..., float],
    dense: bool = False,
) -> Callable[[Callable[P, Schedule]], Callable[P, Schedule]]:
    """Decorator: register a builder under (collective, name) with its closed forms (see `Algorithm`)."""

    def add(build: Callable[P, Schedule]) -> Callable[P, Schedule]:
        signature = inspect.signature(build)

        @functools.wraps(build)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            sizes = signature.bind(*args, **kwargs).arguments
            check_sizes(sizes["world_size"], sizes["numel"])
            if dense and sizes["world_size"] > MOST_DENSE_RANKS:
                raise BadInput(
                    f"{name} on {sizes['world_size']} ranks has about {2 * sizes['world_size'] ** 2:.1g} messages, too "
                    f"many to write down; up to {MOST_DENSE_RANKS} ranks can be, its closed form serves any number"
                )
            schedule = build(*args, **kwargs)
            return replace(schedule, algorithm=name) if schedule.algorithm != name else schedule

        registry = _REGISTRIES.setdefault(collective, Registry(f"{collective} algorithm"))
        registry.add(name, Algorithm(collective, name, checked, rounds, sent_numel, seconds, summary_of(build), dense))
        return checked

    return add


def in_turn(name: str, first: str, second: str) -> dict[str, Any]:
    """The closed forms of an algorithm that runs two collectives of the same name in turn: the sums of theirs."""
    one, two = get(first, name), get(second, name)

    def total(form: str) -> Callable[..., Any]:
        return lambda *sizes, **parameters: sum(getattr(part, form)(*sizes, **parameters) for part in (one, two))

    return {form: total(form) for form in ("rounds", "sent_numel", "seconds")}


def names(collective: str = "all_reduce") -> list[str]:
    """The registered algorithms of a collective, sorted."""
    _find()
    return _REGISTRIES[collective].names() if collective in _REGISTRIES else []


def collectives() -> list[str]:
    """The collectives that have algorithms, sorted."""
    _find()
    return sorted(_REGISTRIES)


def get(collective: str, name: str) -> Algorithm:
    """The algorithm `name` of `collective`; UnknownName lists the valid ones."""
    _find()
    if collective not in _REGISTRIES:
        raise UnknownName("collective", collective, _REGISTRIES)
    return _REGISTRIES[collective].get(name)


def cost(schedule: Schedule, link: Link, itemsize: int = 4) -> float:
    """The closed-form time of a schedule on `link` in seconds (see each algorithm for its formula)."""
    seconds = get(schedule.collective, schedule.algorithm).seconds
    return seconds(schedule.world_size, schedule.numel * itemsize, link, itemsize=itemsize, **schedule.parameters)


@functools.lru_cache(maxsize=256)
def _cached(
    collective: str, name: str, world_size: int, numel: int, parameters: tuple[tuple[str, Any], ...]
) -> Schedule:
    return get(collective, name).build(world_size, numel, **dict(parameters))


def build(collective: str, name: str, world_size: int, numel: int, **parameters: Any) -> Schedule:
    """Build, or take from the cache, the schedule of a named algorithm.

    Raises:
        UnknownName: no such algorithm, or no such parameter of it.
        BadInput: the algorithm cannot be built of these values.
    """
    check_parameters(collective, name, parameters)
    frozen = tuple((key, _hashable(value, world_size)) for key, value in sorted(parameters.items()))
    return _cached(collective, name, world_size, numel, frozen)


def check_parameters(collective: str, name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse a parameter that the algorithm does not have."""
    valid = list(inspect.signature(get(collective, name).build).parameters)[2:]
    for parameter in parameters:
        if parameter not in valid:
            raise UnknownName(f"parameter of {collective} by {name}", parameter, valid or ["none"])


def _hashable(value: Any, world_size: int) -> Any:
    """Lists, and tables by rank, as tuples, so that the cache can tell them apart."""
    if isinstance(value, Mapping):
        if unknown := [rank for rank in value if rank not in range(world_size)]:
            raise BadInput(f"rank {unknown[0]} is not in 0…{world_size - 1}")
        return tuple(_hashable(value.get(rank, ()), world_size) for rank in range(world_size))
    return tuple(_hashable(item, world_size) for item in value) if isinstance(value, list | tuple) else value
