"""The options of an exchange, which `compress`, `distribute` and `elastic` share, and a plan of codecs: a warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler

from laconic.codecs import Codec, codec
from laconic.codecs.compose import Selected
from laconic.codecs.entropy import Entropy
from laconic.codecs.plans import CodecChoice
from laconic.errors import BadInput, UnknownName
from laconic.exchange.costs import SPARSE, coded_names
from laconic.exchange.layout import Exemptions, exemptions
from laconic.transports.base import Transport
from laconic.transports.world import World

if TYPE_CHECKING:
    from laconic.exchange.dgc import DeepGradientCompression

DEFAULT_CODEC = "dynamic8"  # why: docs/guides/compress.md


@dataclass(frozen=True)
class Options:
    """How an exchange runs, beside its codec.

    Args:
        quality: what codec "auto" may pick: exact, 8bit (the default) or aggressive; or "noise", "noise(0.1)": the
            fewest bytes whose error stays below that share of the gradient's noise.
        algorithm: auto (gather or direct, whichever is cheaper), gather, or any all-reduce algorithm.
        exempt: names (regular expressions) sent exactly besides biases, norms and small tensors; or Exemptions.
        feedback: feed the codec's error back; None as the codec needs it.
        feedback_decay: β: what was left out is multiplied by it before it is fed back, e ← β·e + x; None is 1.
        momentum: momentum of the gradients, for Deep Gradient Compression: a number or DeepGradientCompression(…). The
            optimiser is then plain SGD.
        hosts: the host of each rank: float32 inside, the codec between.
        overlap: None overlaps as much as possible with backward and the next forward, to the same bits; False does all
            in `step()`.
        message_nbytes: the target size of a message: gradients are held until their payloads reach it together, or the
            step's last has come. None takes it from the world's link profile, or from that of an ordinary network.
        scaler: the loop's GradScaler, of `compress`: residuals are kept in units of its scale, and follow its changes.
        world: where to communicate; when None the default world, joined at the first exchange.

    Raises:
        UnknownName: no such algorithm.
        BadInput: `hosts` does not name the host of every rank.

    >>> Options(algorithm="ring", exempt=["head"]).algorithm
    'ring'
    """

    quality: str | None = None
    algorithm: str = "auto"
    exempt: Exemptions | Sequence[str] | None = None
    feedback: bool | None = None
    feedback_decay: float | None = None
    momentum: float | DeepGradientCompression | None = None
    hosts: tuple[int, ...] | None = None
    message_nbytes: int | None = None
    overlap: bool | None = None
    scaler: GradScaler | None = None
    world: World | None = None

    def __post_init__(self) -> None:
        valid = coded_names()
        if self.algorithm not in valid:
            raise UnknownName("compressed all-reduce algorithm", self.algorithm, valid)
        nbytes = self.message_nbytes
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
            raise BadInput(f"message_nbytes must be a whole number of bytes from 0, got {nbytes!r}")
        for name in ("feedback", "overlap"):
            if getattr(self, name) not in (None, True, False):
                raise BadInput(f"{name} must be True, False or None, got {getattr(self, name)!r}")
        decay = self.feedback_decay
        if decay is not None and (isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1):
            raise BadInput(f"feedback_decay is above 0 and at most 1, got {decay!r}; feedback=False feeds nothing back")
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise BadInput(f"scaler must be the loop's torch.amp.GradScaler, got {type(self.scaler).__name__}")
        if self.world is not None:
            if not isinstance(self.world, World):
                raise BadInput(f"world must be what laconic.init() returns, got {type(self.world).__name__}")
            self.check_hosts(self.world)

    @classmethod
    def of(cls, given: Mapping[str, Any], door: str) -> Options:
        """The options a user gave to `door` by name.

        >>> Options.of({"algoritm": "ring"}, "compress")
        Traceback (most recent call last):
        ...
        laconic.errors.UnknownName: unknown option of compress 'algoritm'; did you mean 'algorithm'? The valid ones: \
algorithm, exempt, feedback, feedback_decay, hosts, message_nbytes, momentum, overlap, quality, scaler, world
        """
        valid = {field.name for field in fields(cls)}
        if unknown := given.keys() - valid:
            raise UnknownName(f"option of {door}", min(unknown), valid)
        return cls(**given)

    @property
    def exemptions(self) -> Exemptions:
        """The Exemptions that `exempt` stands for."""
        return exemptions(self.exempt)

    def refuse(self, subject: str, known: Sequence[str] = ()) -> None:
        """Raise BadInput for a given option that `subject` does not have; `world` is always allowed.

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


def refuse_unsized(choice: CodecChoice, algorithm: str, transport: Transport) -> None:
    """Raise BadInput if messages would vary in length, and the engine cannot send such."""
    if not transport.sized:
        return
    text = f"and {transport.engine} sends only messages whose length both sides know: use engine gloo or zmq"
    for each in choice.codecs():
        if each.name == "factors" or not each.fixed_size:
            raise BadInput(f"payloads of codec '{each}' vary in length, {text}, or another codec")
    if algorithm in SPARSE:
        raise BadInput(f"messages of algorithm '{algorithm}' vary in length, {text}, or algorithm direct or gather")


PAPER = (0.25, 0.0625, 0.015625, 0.00390625)  # sparsity 75 %, 93.75 %, 98.4375 %, 99.6 %


def sparsity_warm_up(
    final: str | Codec = "topk(0.001)", *, steps_per_epoch: int, fractions: Sequence[float] = PAPER
) -> dict[int, str]:
    """The codec of each step: `final` with one of `fractions` in each of the first epochs, then `final` itself.

    The defaults are the paper's: 75 %, 93.75 %, 98.4375 %, 99.6 % kept back in the first four epochs, then 99.9 %.
    Fractions that are not above `final`'s are left out, and their epochs with them.

    Args:
        final: a selector that takes a fraction, alone or composed, such as "topk(0.001)+qsgd(4)".
        steps_per_epoch: the steps each fraction is used for.
        fractions: the share of elements sent in each epoch.

    Raises:
        BadInput: steps_per_epoch is below 1, a fraction out of range, or `final` takes none.

    >>> sparsity_warm_up(steps_per_epoch=100)
    {0: 'topk(0.25)', 100: 'topk(0.0625)', 200: 'topk(0.015625)', 300: 'topk(0.00390625)', 400: 'topk(0.001)'}
    >>> sparsity_warm_up("topk(0.02)+qsgd(2)", steps_per_epoch=10, fractions=(0.1,))
    {0: 'topk(0.1)+qsgd(2)', 10: 'topk(0.02)+qsgd(2)'}

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, §3.3.
    """
    if isinstance(steps_per_epoch, bool) or not isinstance(steps_per_epoch, int) or steps_per_epoch < 1:
        raise BadInput(f"steps_per_epoch must be a whole number of at least 1, got {steps_per_epoch!r}")
    last = codec(final)
    least = _fraction(last)
    chosen = [_with_fraction(last, fraction) for fraction in fractions if fraction > least]
    return {epoch * steps_per_epoch: str(entry) for epoch, entry in enumerate([*chosen, last])}


def _fraction(chosen: Codec) -> float:
    """The share of elements that a selector sends, below 1."""
    selector: Any = chosen
    while isinstance(selector, Entropy | Selected):
        selector = selector.coded if isinstance(selector, Entropy) else selector.selector
    fraction = getattr(selector, "fraction", None)
    if fraction is None or fraction >= 1:
        raise BadInput(f"a warm-up needs a selector that takes a fraction below 1, such as topk(0.001); got '{chosen}'")
    return float(fraction)


def _with_fraction(chosen: Any, fraction: float) -> Any:
    """The same codec with another fraction; the selector itself refuses one out of range."""
    if isinstance(chosen, Entropy):
        return replace(chosen, inner=_with_fraction(chosen.coded, fraction))
    if isinstance(chosen, Selected):
        return replace(chosen, selector=_with_fraction(chosen.selector, fraction))
    return replace(chosen, fraction=fraction)
