"""The specification of a search, as its folder keeps it.

    runs/<id>/search.json     this, sealed
    runs/<id>/journal.log     every trial, unless a storage is named
    runs/<id>/weights/        what trials kept for those that go on from them
    runs/<id>/trials/         the run of each trial, where workloads are trained
    runs/<id>/report.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner

from laconic.errors import BadInput, PayloadError, RecordError, UnknownName
from laconic.searching import pruners, samplers
from laconic.searching.samplers import Sampler
from laconic.searching.space import Space
from laconic.specs import check_kinds
from laconic.storage.files import replace as replace_file
from laconic.storage.json_text import seal, unseal

FILE = "search.json"
FORMAT = 1


@dataclass(frozen=True)
class SearchSpec:
    """A search.

    Attributes:
        objective: its name, as a record has it: a workload, module:function, or the function's own name.
        space: what is searched.
        method: how, such as evolution(population=30).
        trials: how many count; one that fails first and then does not counts once.
        rule: of early stopping.
        maximize: whether higher values are better.
        seed: of the method's draws and of the trials' seeds.
        parallel: processes that evaluate trials at the same time; 0 evaluates in this one.
        workers: ranks of each trial.
        storage: address of the storage; "" for a journal in the folder.
        folder: runs/<id>.
        start: points to try first.
        retries: how often a failed trial is tried again.
        give_up: so many failures one after the other end the search.
        limit_s: a trial that takes longer has failed.
        options: of the objective.
    """

    objective: str
    space: Space
    method: str = "tpe"
    trials: int = 50
    rule: str = "none"
    maximize: bool = True
    seed: int = 0
    parallel: int = 0
    workers: int = 1
    storage: str = ""
    folder: Path = Path("runs/search")
    start: Sequence[Mapping[str, Any]] = ()
    retries: int = 1
    give_up: int = 10
    limit_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        check_kinds("search", SearchSpec, vars(self))
        limits = {"trials": 1, "parallel": 0, "workers": 1, "retries": 0, "give_up": 1, "seed": 0}
        for name, least in limits.items():
            if (value := getattr(self, name)) < least:
                raise BadInput(f"{name} is a whole number from {least} on, got {value}")
        if self.limit_s is not None and not (self.limit_s > 0 and math.isfinite(self.limit_s)):
            raise BadInput(f"limit_s is above 0, got {self.limit_s}")
        if self.workers > 1 and not self.parallel:
            raise BadInput("trials of several workers need processes: use parallel=1 or more")
        if self.limit_s is not None and not self.parallel:
            raise BadInput("only a trial in a process of its own can be ended: use limit_s with parallel=1 or more")
        pruners.build(self.rule)
        sampler = self.sampler()
        sampler.check(self.space)
        if sampler.seed or sampler.space:
            raise BadInput(f"a search has its own seed and space: leave them out of its method, got {self.method}")
        for point in self.start:
            self.space.checked(point)

    @classmethod
    def of(cls, objective: str, space: Space, options: Mapping[str, Any]) -> SearchSpec:
        """A search with options by name.

        Raises:
            UnknownName: there is no such option; the valid ones are listed.
        """
        valid = {each.name for each in fields(cls)} - {"objective", "space"}
        for name in options:
            if name not in valid:
                raise UnknownName("option of a search", name, valid)
        return cls(objective, space, **options)

    def sampler(self) -> Sampler:
        """The sampler."""
        return samplers.build(self.method)

    def pruner(self) -> BasePruner:
        """The pruner: of the rule, or else of the method."""
        return pruners.build(self.sampler().rule if self.rule == "none" else self.rule)

    @property
    def sign(self) -> float:
        """Score × sign is the value."""
        return 1.0 if self.maximize else -1.0

    @property
    def address(self) -> str:
        """Of the storage."""
        return self.storage or str(self.folder / "journal.log")

    @property
    def study(self) -> str:
        """The study's name: a journal in the folder has but one, and the folder may be moved."""
        return self.folder.name if self.storage else "search"

    def to_json(self) -> dict[str, Any]:
        """What the folder keeps, as plain values."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data |= {"space": self.space.to_table(), "folder": None, "start": [dict(p) for p in self.start]}
        plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **data}))
        return plain

    def save(self) -> None:
        """Write it into the folder."""
        replace_file(self.folder / FILE, seal(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> SearchSpec:
        """The search in a folder.

        Raises:
            RecordError: there is none, or it is damaged.
        """
        folder = folder.parent if folder.name == FILE else folder
        try:
            data = unseal((folder / FILE).read_bytes())
        except OSError as error:
            raise RecordError(f"{folder} holds no search: {error.strerror}") from error
        except PayloadError as error:
            raise RecordError(f"{folder / FILE} is {error}") from error
        if data.pop("format", None) != FORMAT:
            raise RecordError(f"{folder / FILE} is of another format; this version reads {FORMAT}")
        try:
            spec = cls.of(data.pop("objective"), Space.read(data.pop("space")), {**data, "folder": folder})
            return replace(spec, start=tuple(spec.start))
        except (KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{folder / FILE} is not a search: {error!r}") from error
