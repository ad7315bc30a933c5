"""The options of an exchange, which `compress`, `distribute` and `elastic` share, and the codec where none is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from laconic.errors import BadInput, UnknownName
from laconic.exchange.auto import coded_names
from laconic.exchange.dgc import DeepGradientCompression
from laconic.exchange.policy import Exemptions, exemptions
from laconic.transports.world import World

DEFAULT_CODEC = "dynamic8"  # why: docs/exchange.md
MESSAGE_NBYTES = 1 << 18  # a message of less costs mostly its latency on gigabit links and slower ones


@dataclass(frozen=True)
class Options:
    """How an exchange runs, beside its codec.

    Args:
        quality: what codec "auto" may pick: exact, 8bit (the default) or aggressive.
        algorithm: auto (gather or direct, whichever is cheaper), gather, or any all-reduce algorithm.
        exempt: names (regular expressions) sent exactly besides biases, norms and small tensors; or Exemptions.
        feedback: feed the codec's error back; None as the codec needs it.
        momentum: momentum of the gradients, for Deep Gradient Compression: a number or DeepGradientCompression(…). The
            optimiser is then plain SGD.
        hosts: the host of each rank: float32 inside, the codec between.
        message_nbytes: buckets are held until their payloads make this much together, or the step's last has come.
        world: where to communicate; when None the default world, joined at the first exchange.

    Raises:
        UnknownName: no such algorithm.
        BadInput: `hosts` does not name the host of every rank.
    """

    quality: str | None = None
    algorithm: str = "auto"
    exempt: Exemptions | Sequence[str] | None = None
    feedback: bool | None = None
    momentum: float | DeepGradientCompression | None = None
    hosts: tuple[int, ...] | None = None
    message_nbytes: int = MESSAGE_NBYTES
    world: World | None = None

    def __post_init__(self) -> None:
        valid = coded_names()
        if self.algorithm not in valid:
            raise UnknownName("compressed all-reduce algorithm", self.algorithm, valid)
        if self.world is not None:
            self.check_hosts(self.world)

    @classmethod
    def of(cls, given: Mapping[str, Any], door: str) -> Options:
        """The options a user gave to `door` by name.

        >>> Options.of({"algoritm": "ring"}, "compress")
        Traceback (most recent call last):
        ...
        laconic.errors.UnknownName: unknown option of compress 'algoritm'; did you mean 'algorithm'? The valid ones: \
algorithm, exempt, feedback, hosts, message_nbytes, momentum, quality, world
        """
        valid = {field.name for field in fields(cls)}
        if unknown := given.keys() - valid:
            raise UnknownName(f"option of {door}", min(unknown), valid)
        return cls(**given)

    @property
    def exemptions(self) -> Exemptions:
        """What `exempt` stands for."""
        return exemptions(self.exempt)

    def refuse(self, subject: str, known: Sequence[str] = ()) -> None:
        """Raise BadInput where an option is given that `subject` does not have; `world` may always be given.

        >>> Options(hosts=(0, 1)).refuse("consistency 'robust'", ("exempt",))
        Traceback (most recent call last):
        ...
        laconic.errors.BadInput: consistency 'robust' has no option hosts; it has exempt
        """
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default and f.name != "world"]
        if strange := sorted(set(given) - set(known)):
            has = f"; it has {', '.join(known)}" if known else ""
            raise BadInput(f"{subject} has no option {', '.join(strange)}{has}")

    def check_hosts(self, world: World) -> World:
        """Return `world`, if `hosts` fits it."""
        if self.hosts is not None and len(self.hosts) != world.world_size:
            raise BadInput(f"hosts names the host of {len(self.hosts)} ranks, the world has {world.world_size}")
        return world
