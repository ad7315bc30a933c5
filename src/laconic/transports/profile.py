"""A link profile: the measured cost of the network between these ranks, saved as JSON.

Callers: `probe` makes one; `auto`, the simulator and the planner read it. Immutable; the same on every rank.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from laconic import schedules
from laconic.errors import BadInput, PayloadError, ProfileError
from laconic.schedules import Link
from laconic.storage.files import replace
from laconic.storage.json_text import seal, unseal
from laconic.storage.typed_json import from_plain

FORMAT = "laconic link profile"
VERSION = 1
LINK_VARIABLE = "LACONIC_LINK"


@dataclass(frozen=True)
class FitResidual:
    """One measurement behind the fit: a round of `messages` messages of `nbytes` to one peer, and what the fit says."""

    messages: int
    nbytes: int
    measured_s: float
    fitted_s: float

    def __post_init__(self) -> None:
        if self.messages < 1 or self.nbytes < 0:
            raise BadInput(f"a measurement has 1 message or more, of 0 bytes or more, got {self}")
        _check_time(self.measured_s)
        if not math.isfinite(self.fitted_s):
            raise BadInput(f"{self.fitted_s} is not a finite number")

    @property
    def relative(self) -> float:
        """(fitted − measured) / measured."""
        return self.fitted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class Profile:
    """What `probe` found.

    Attributes:
        engine: the engine it was measured on.
        world_size: the ranks that took part.
        link: the fitted LogGP parameters with the reduction cost.
        residuals: each measurement beside its fit.
        measured: for each all-reduce algorithm, and `native`, its (nbytes, seconds), by rising nbytes.
        hosts: the host of each rank.
        created: when, in UTC (ISO 8601).
        versions: of Python, torch and Laconic.

    >>> profile = Profile("gloo", 2, Link.parse("1gbit,50us"))
    >>> profile.engine, profile.world_size
    ('gloo', 2)
    """

    engine: str
    world_size: int
    link: Link
    residuals: tuple[FitResidual, ...] = ()
    measured: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise BadInput(f"a world has 1 rank or more, got {self.world_size}")
        for algorithm, points in self.measured.items():
            for nbytes, seconds in points:
                _check_time(seconds)
                if nbytes < 1:
                    raise BadInput(f"{algorithm}: a measured size is 1 byte or more, got {nbytes}")
            if any(before >= after for (before, _), (after, _) in itertools.pairwise(points)):
                raise BadInput(f"{algorithm}: measured sizes do not rise")

    @property
    def relative_rms(self) -> float:
        """The root of the mean squared relative residual: 0.1 means that the fit is typically 10 % off."""
        if not self.residuals:
            return 0.0
        return math.sqrt(sum(r.relative**2 for r in self.residuals) / len(self.residuals))

    def seconds(self, algorithm: str, world_size: int, nbytes: int) -> float:
        """The time of an all-reduce of `nbytes` by `algorithm`, measured where possible, else by the closed form.

        Between measured sizes log-log linear; below the smallest constant (latency rules there); beyond the largest
        it grows as the closed form does. `native` is taken for a ring where it was not measured.

        Raises:
            UnknownName: no such algorithm.
        """
        points = self.measured.get(algorithm, ())
        closed_form = schedules.get("all_reduce", "ring" if algorithm == "native" else algorithm).seconds
        if not points or world_size != self.world_size:
            return closed_form(world_size, nbytes, self.link)
        largest, seconds = points[-1]
        if nbytes <= largest:
            return _interpolated(points, nbytes)
        return seconds + closed_form(world_size, nbytes, self.link) - closed_form(world_size, largest, self.link)

    def cheapest(self, world_size: int, nbytes: int, candidates: Iterable[str]) -> str:
        """The candidate with the least `seconds`; of equals, the one named first.

        >>> Profile("gloo", 4, Link.parse("1gbit,50us")).cheapest(8, 100_000_000, ["tree", "ring", "butterfly"])
        'ring'
        """
        names = list(candidates)
        if not names:
            raise BadInput("there are no algorithms to choose from")
        return min(names, key=lambda name: self.seconds(name, world_size, nbytes))

    def to_json(self) -> str:
        """The profile as sealed JSON text; `from_json` gives back an equal one."""
        body = {**asdict(self), "format": FORMAT, "version": VERSION, "relative_rms": self.relative_rms}
        return seal(body, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Read `to_json`'s text, or one that somebody wrote by hand without a seal.

        Raises:
            ProfileError: not JSON, changed since, not a link profile, from another version, or with a wrong field.
        """
        try:
            body = unseal(text, required=False)
        except PayloadError as error:
            raise ProfileError(f"the link profile is {error}") from error
        if body.get("format") != FORMAT:
            raise ProfileError("this JSON is not a link profile; make one with: laconic probe")
        if body.get("version") != VERSION:
            raise ProfileError(
                f"the link profile has version {body.get('version')}, this Laconic reads version {VERSION}; "
                "make a new one with: laconic probe"
            )
        given = {name: value for name, value in body.items() if name not in ("format", "version", "relative_rms")}
        try:
            return from_plain(cls, given, "the link profile", whole=True)
        except PayloadError as error:
            raise ProfileError(str(error)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path` atomically: readers see the old file or the new one."""
        replace(path, self.to_json())

    @classmethod
    def known(cls, given: Profile | str | os.PathLike[str] | None = None) -> Profile | None:
        """The given profile, or the one at the given path, or the one that LACONIC_LINK names; else None."""
        found = given or os.environ.get(LINK_VARIABLE)
        return found if found is None or isinstance(found, Profile) else cls.load(found)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a saved profile.

        Raises:
            ProfileError: naming the file and what is wrong with it.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except FileNotFoundError as error:
            raise ProfileError(f"there is no link profile at {path}; make one with: laconic probe") from error
        except OSError as error:
            raise ProfileError(f"{path} cannot be read: {error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error


def _check_time(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise BadInput(f"a measured time is a finite number above zero, got {seconds}")


def _interpolated(points: tuple[tuple[int, float], ...], nbytes: int) -> float:
    """Log-log linear between the measured sizes around `nbytes`, which is not above the largest."""
    sizes = [size for size, _ in points]
    after = bisect.bisect_left(sizes, nbytes)
    if after == 0:
        return points[0][1]
    (size0, seconds0), (size1, seconds1) = points[after - 1], points[after]
    share = math.log(nbytes / size0) / math.log(size1 / size0)
    return seconds0 * math.exp(share * math.log(seconds1 / seconds0))
