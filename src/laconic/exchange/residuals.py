"""Wrappers around a channel's codec, and the one that nearly every channel has: feedback, with residuals by name.

A channel's values go through wrappers, the outermost first: each may change a bucket's gradients before they are cut
into channels, and may wrap a channel's encoder. They compose, and know nothing of each other: `Residuals` feeds back
what codecs left out of one message, `dgc.MomentumCorrection` adds momentum. A warm-up is a plan of codecs
(`options.sparsity_warm_up`); `buckets.ExemptSplit` decides which parameters are exempt.

Callers: everything that sends through a codec repeatedly: buckets, FSDP's shards, matrix codecs, servers, elastic
jobs. A `Residual` belongs to one vector on its way through a codec; `Residuals` owns all of an exchange and knows which
names (parameters, shards of a server) lie in which vector, so that they follow a name to another codec, bucket, world
size or checkpoint.

Invariant, exactly as the codec's encode_feedback defines it: sent + residual after = input + residual before.

Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.compose import Selected
from laconic.codecs.entropy import Entropy
from laconic.errors import BadInput, NonFiniteError
from laconic.exchange.layout import Entry, cut_off, joined
from laconic.storage.form import check_named
from laconic.storage.tree import own_copy

Site = tuple[int, int, int]  # where something is encoded: round, start, stop
Mode = Literal["off", "selection", "full"]


class Encoder(Protocol):
    """Makes a channel's payloads: its codec alone (PLAIN), a `Residual`, or a wrapper of one.

    `gathers`: it has to see all that a rank sends, so payloads go whole to all ranks.
    """

    @property
    def gathers(self) -> bool: ...
    def carry(self, x: Tensor) -> Tensor: ...
    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor: ...


class Wrapper(Protocol):
    """Changes gradients around a codec; its state is kept by parameter name, under `key`.

    `dense`: it needs whole, dense gradients as float32 in host memory.
    """

    key: str
    dense: bool

    def before(self, entries: Sequence[Entry], values: Tensor, world_size: int, *, exact: bool) -> None:
        """Change a bucket's gradients in place before they are sent; `exact`: as they are, past all encoders."""

    def wrap(self, inner: Encoder, codec: Codec, members: Sequence[Entry]) -> Encoder:
        """Return the encoder of a channel of these parameters; exempt ones among them are not sent."""

    def rescale(self, factor: float, loss_scale: float) -> None:
        """Gradients are multiplied by another scale from now on, `factor` of the last."""

    def state_dict(self) -> dict[str, Tensor]: ...
    def check_state(self, state: Mapping[str, Any], numels: Mapping[str, int] | None = None) -> None: ...
    def load_state_dict(self, state: Mapping[str, Tensor], *, resumed: bool = False) -> None: ...


def _checked(codec: Codec, payload: Tensor) -> Tensor:
    """The payload; a NonFiniteError if it stays on a device, which has only noted that its values are not finite."""
    if not payload.is_cpu and not codec.fine:
        codec.check()  # type: ignore[attr-defined]
    return payload


class _Plain:
    gathers = False

    def carry(self, x: Tensor) -> Tensor:
        return x

    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor:
        return _checked(codec, codec.encode(x, step=step, out=out))


PLAIN: Encoder = _Plain()


def mode_for(codec: Codec, feedback: bool | None = None) -> Mode:
    """What to feed back: nothing for unbiased codecs and casts, what was not selected where the rest is unbiased, else
    all. `feedback` False feeds nothing back, True also what a codec does not need, but for exact ones.

    The noise of an unbiased quantiser averages out by itself. Fed back, it need not stay bounded: QSGD with 7 levels on
    buckets of 512 has up to 3.2 times the variance of its input, and the residual would grow at every step.

    >>> from laconic.codecs import codec
    >>> [mode_for(codec(spec)) for spec in ("qsgd(4)", "topk(0.01)+qsgd(4)+entropy", "topk(0.01)", "dynamic8")]
    ['off', 'selection', 'full', 'full']
    >>> mode_for(codec("qsgd(4)"), True), mode_for(codec("topk(0.01)"), False)
    ('full', 'off')
    """
    if feedback is False or codec.exact:
        return "off"
    coded = codec.coded if isinstance(codec, Entropy) else codec
    if isinstance(coded, Selected) and coded.quantiser.unbiased:
        return "selection"
    return "off" if (codec.unbiased or codec.fine) and feedback is None else "full"


class ResidualLayout(Protocol):
    """Where named values lie in a vector: `cut` gives each name's, flat; `join` has zeros where a name has none."""

    @property
    def numel(self) -> int: ...
    @property
    def names(self) -> Sequence[str]: ...
    def cut(self, vector: Tensor) -> dict[str, Tensor]: ...
    def join(self, values: Mapping[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class SideBySide:
    """Parts one after the other: name and length; a part without a name is blank: it has no residual."""

    parts: tuple[tuple[str | None, int], ...]

    @property
    def numel(self) -> int:
        return sum(numel for _, numel in self.parts)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.parts if name is not None]

    @property
    def blanks(self) -> list[tuple[int, int]]:
        edges = list(itertools.accumulate((numel for _, numel in self.parts), initial=0))
        return [(a, b) for (name, _), (a, b) in zip(self.parts, itertools.pairwise(edges), strict=True) if name is None]

    def cut(self, vector: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(vector, [numel for _, numel in self.parts])
        return {name: piece for (name, _), piece in zip(self.parts, pieces, strict=True) if name is not None}

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([_fitting(values.get(name or ""), name, numel) for name, numel in self.parts])


def _fitting(value: Tensor | None, name: str | None, numel: int) -> Tensor:
    if value is None:
        return torch.zeros(numel)
    if value.numel() != numel:
        raise BadInput(f"the residual of '{name}' has {value.numel()} values, '{name}' has {numel}: another model's?")
    return value.reshape(-1)


class Residual:
    """The residual of one vector, by site: each leg of an all-reduce has its own.

    Args:
        numel: the vector's length.
        mode: "full" feeds everything back, "selection" only what a selector left out, "off" nothing.
        blanks: slices of the vector that are always zero; they get no residual.
        decay: β, by which what is left is multiplied before it is fed back.
        tentative: what `encode`, `carry` and `settle` change counts only once `commit` is called; costs one copy of
            the residual a step, and its memory a second time.
    """

    gathers = False

    def __init__(
        self,
        numel: int,
        mode: Mode = "full",
        *,
        blanks: Sequence[tuple[int, int]] = (),
        decay: float = 1.0,
        tentative: bool = False,
    ) -> None:
        self.numel = numel
        self.mode = mode
        self._blanks = blanks
        self._decay = decay
        self._tentative = tentative
        self._carried: Tensor | None = None  # from a former codec, layout or checkpoint, still to be sent
        self._carrying = self._settling = False
        self._resuming = self._resumed = False  # in the exchange to come, or under way: sites take what is carried
        self._sites: dict[Site, Tensor] = {}
        self._copies: dict[Site, int] = {}
        self._event: Any = None  # on a device: when the sites are what they are
        self._drafts: dict[Site, Tensor] = {}  # what the sites become at `commit`
        self._drafted: set[Site] = set()

    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor:
        """Encode x plus its site's residual; keep the new residual. A NonFiniteError clears the site.

        `copies` ranks encode the same sum and have the same residual at this site: each counts for its share.
        """
        if self.mode == "off":
            return _checked(codec, codec.encode(x, step=step, out=out))
        residual = self._sites.get(site)
        if residual is None:
            residual = self._sites[site] = self._inherited(site, copies, x.device)
            self._copies[site] = copies
        if not residual.is_cpu:
            return self._encode_there(codec, x, residual, site, step, out)
        if self._tentative:
            residual = self._draft(site, residual)
        return self._encode(codec, x, residual, site, step, out)

    def squared(self) -> float:
        """The sum of squares of what is kept at all sites, and of what is carried."""
        self._let_wait()
        kept = [*list(self._sites.values()), *([] if self._carried is None else [self._carried])]
        return sum(_squared(each) for each in kept)

    def _encode_there(self, codec: Codec, x: Tensor, residual: Tensor, site: Site, step: int, out: Tensor) -> Tensor:
        """As `encode`, on the current stream of a device; an event marks when the residual may be read elsewhere."""
        self._let_wait()
        try:
            return self._encode(codec, x, residual, site, step, out)
        finally:
            self._mark(residual)

    def _encode(self, codec: Codec, x: Tensor, residual: Tensor, site: Site, step: int, out: Tensor) -> Tensor:
        if self._decay != 1.0:
            residual.mul_(self._decay)
        try:
            if self.mode == "selection":
                return _checked(codec, codec.encode_selection(x, residual, step=step, out=out))  # type: ignore[attr-defined]
            payload = _checked(codec, codec.encode_feedback(x, residual, step=step, out=out))
            if codec.fine:  # casts send NaN and infinity instead of refusing them; they must not stay in the residual
                torch.nan_to_num_(residual, nan=0.0, posinf=0.0, neginf=0.0)
            for start, stop in self._blanks:
                residual[max(0, start - site[1]) : max(0, stop - site[1])] = 0.0
            return payload
        except NonFiniteError:
            residual.zero_()
            raise

    def _let_wait(self) -> None:
        """Make the current stream wait for the sites."""
        if self._event is not None:
            from laconic.codecs.device.streams import let_wait

            let_wait(self._event)

    def _mark(self, residual: Tensor) -> None:
        from laconic.codecs.device.streams import mark

        self._event = mark(residual)

    def _here(self) -> dict[Site, Tensor]:
        """The sites in the processor's memory."""
        if self._event is not None:
            self._event.synchronize()
        return {site: residual.cpu() for site, residual in self._sites.items()}

    def _inherited(self, site: Site, copies: int, device: torch.device) -> Tensor:
        """The first residual of a site: zeros, or its part of what it was in another job."""
        first = torch.zeros(site[2] - site[1], device=device)
        if self._resumed and self._carried is not None and copies == 1:
            part = self._carried[site[1] : site[2]]
            first.copy_(part)
            part.zero_()
        return first

    def _draft(self, site: Site, now: Tensor) -> Tensor:
        """A copy of the site's residual, to be changed into the next."""
        draft = self._drafts.get(site)
        if draft is None:
            draft = self._drafts[site] = torch.empty_like(now)
        self._drafted.add(site)
        self._settling = False
        return draft.copy_(now)

    @property
    def carries(self) -> bool:
        """Whether `carry` has something to add."""
        return self._carried is not None

    def carry(self, x: Tensor) -> Tensor:
        """Add the residual of a former codec, layout or checkpoint to x, in place.

        In the first exchange of a resumed job each site takes its part instead: added to x, the second leg's residual
        would be rounded elsewhere. The next exchange adds what no site has taken.
        """
        self._resumed, self._resuming = self._resuming, False
        if self._carried is not None and not self._resumed:
            x += self._carried.to(x.device)
            self._carrying = True
            if not self._tentative:
                self.commit()
        return x

    def settle(self, x: Tensor) -> Tensor:
        """Add everything to x, which is then sent exactly: nothing is left. x is changed in place."""
        x += self.total().to(x.device)
        self._settling = True
        self._drafted.clear()
        if not self._tentative:
            self.commit()
        return x

    def commit(self) -> None:
        """Make all changes since the last commit permanent: the step was applied."""
        if self._settling:
            self._sites.clear()
        for site in self._drafted:
            self._sites[site], self._drafts[site] = self._drafts[site], self._sites[site]
        if self._carrying or self._settling:
            self._carried = None
        self.roll_back()

    def roll_back(self) -> None:
        """Undo all changes since the last commit: the step failed."""
        self._drafted.clear()
        self._carrying = self._settling = False

    def total(self) -> Tensor:
        """The whole residual, as a new vector."""
        total = torch.zeros(self.numel) if self._carried is None else self._carried.clone()
        for site, residual in self._here().items():
            self._add_site(total, site, residual)
        return total

    def _add_site(self, total: Tensor, site: Site, residual: Tensor) -> None:
        copies = self._copies[site]
        total[site[1] : site[2]] += residual if copies == 1 else residual / copies

    def release(self) -> Tensor:
        """Return the whole residual as one vector and reset it; each site's memory is freed once it is added."""
        whole = (0, 0, self.numel)
        self._sites, self._event = self._here(), None
        if self._carried is None and self._sites.keys() == {whole} and self._copies[whole] == 1:
            total = self._sites.pop(whole)
        else:
            total = torch.zeros(self.numel) if self._carried is None else self._carried
            while self._sites:
                self._add_site(total, *self._sites.popitem())
        self.restart()
        return total

    def restart(self, left: Tensor | None = None, *, resumed: bool = False) -> None:
        """Restart with `left`, which it then owns; `carry` adds it to the input.

        `resumed`: it is of the same vector on the same way in another job, so that its sites are as they were.
        """
        if left is not None and left.numel() != self.numel:
            raise BadInput(f"the residual has {left.numel()} values, the vector {self.numel}")
        self.roll_back()
        self._sites.clear()
        self._drafts.clear()
        self._carried = left if left is not None and bool(left.any()) else None
        self._resuming, self._resumed = resumed and self.mode != "off", False

    def rescale(self, factor: float) -> None:
        """Multiply the residual by `factor`, as its unit changed; between two exchanges."""
        self._let_wait()
        for left in (*self._sites.values(), *(() if self._carried is None else (self._carried,))):
            left.mul_(factor)
            if not left.is_cpu:
                self._mark(left)

    def whole(self) -> Tensor:
        """The residual itself, for codecs that feed back by themselves: the caller changes it in place."""
        site = (0, 0, self.numel)
        if set(self._sites) != {site} or self._carried is not None:
            total = self.release()
            self._sites[site], self._copies[site] = total, 1
        return self._sites[site]


def _squared(values: Tensor) -> float:
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))  # without a copy


class Residuals:
    """All residuals of one sender, by name; as a `Wrapper`, feedback, the innermost: codecs add a residual themselves.

    Args:
        feedback: None feeds back what each codec needs, False nothing, True all but what exact codecs leave out.
        decay: as for `Residual`.
        tentative: as for `Residual`: each step ends in `commit` or `roll_back`.

    >>> from laconic.codecs import codec
    >>> residuals, room = Residuals(tentative=True), torch.empty(99, dtype=torch.uint8)
    >>> for _ in range(2):  # the first attempt fails
    ...     residuals.roll_back()
    ...     payload = residuals.encode("weights", codec("topk(0.5)"), torch.tensor([1.0, 3.0]), step=0, out=room)
    >>> residuals.commit()
    >>> residuals.state_dict()
    {'weights': tensor([1., 0.])}
    """

    key = "residuals"
    dense = False

    def __init__(self, feedback: bool | None = None, *, decay: float | None = None, tentative: bool = False) -> None:
        self.feedback = feedback
        self._decay = 1.0 if decay is None else decay
        self._tentative = tentative
        self._vectors: dict[str, tuple[ResidualLayout, Residual]] = {}  # by each name that lies in it
        self._codecs: dict[str, Codec] = {}  # of the names that `encode` was called for
        self._waiting: dict[str, Tensor] = {}  # of names that lie in no vector now
        self._resumed: set[str] = set()  # of these, those that another job left as it would have gone on

    def before(self, entries: Sequence[Entry], values: Tensor, world_size: int, *, exact: bool) -> None:
        """If gradients are sent exactly, add all residuals of earlier codecs at once."""
        if exact and self:
            for entry in entries:
                self.settle(entry.name, values[entry.start : entry.stop])

    def wrap(self, inner: Encoder, codec: Codec, members: Sequence[Entry]) -> Encoder:
        parts = tuple((None if entry.exempt else entry.name, entry.numel) for entry in members)
        return self.lay_out(SideBySide(parts), codec) or inner

    def lay_out(self, layout: ResidualLayout, codec: Codec) -> Residual | None:
        """Return the residual of a vector that now goes through `codec`, with what its names had before.

        None if nothing is fed back, and nothing is left.
        """
        return self._laid_out(layout, mode_for(codec, self.feedback))

    def _laid_out(self, layout: ResidualLayout, mode: Mode) -> Residual | None:
        left = {name: value for name in layout.names if (value := self.take(name)) is not None}
        if mode == "off" and not left:
            return None
        blanks = layout.blanks if isinstance(layout, SideBySide) else ()
        residual = Residual(layout.numel, mode, blanks=blanks, decay=self._decay, tentative=self._tentative)
        if left:
            residual.restart(layout.join(left), resumed=self._resumed >= left.keys())
            for value in left.values():
                _free_pages(value)
        self._resumed.difference_update(layout.names)
        self._vectors.update(dict.fromkeys(layout.names, (layout, residual)))
        return residual

    def encode(self, name: str, codec: Codec, x: Tensor, *, step: int, out: Tensor) -> Tensor:
        """Encode the whole vector `name`, which lies alone, and its residual; a NonFiniteError clears it."""
        if self._codecs.get(name) != codec:
            self._laid_out(SideBySide(((name, x.numel()),)), mode_for(codec, self.feedback))
            self._codecs[name] = codec
        if name not in self._vectors:
            return codec.encode(x, step=step, out=out)
        residual = self._vectors[name][1]
        if residual.carries:
            x = residual.carry(x.clone())
        return residual.encode(codec, x, (0, 0, x.numel()), step=step, out=out)

    def norm(self) -> float:
        """The 2-norm of all residuals; while an exchange is under way, of some of before and some of after."""
        vectors = {id(residual): residual for _, residual in list(self._vectors.values())}
        squares = [residual.squared() for residual in vectors.values()]
        squares += [_squared(value) for value in list(self._waiting.values())]
        return math.sqrt(sum(squares))

    def whole(self, name: str, numel: int) -> Tensor:
        """The residual of `name` itself, zeros at first, for codecs that feed back by themselves, in place."""
        found = self._vectors.get(name)
        if found is None or list(found[0].names) != [name]:
            self._laid_out(SideBySide(((name, numel),)), "full")
        return self._vectors[name][1].whole()

    def settle(self, name: str, x: Tensor) -> Tensor:
        """Add all that is left of `name` to x, which is then sent exactly; x is changed in place."""
        if self._tentative:
            if name in self._waiting:
                self._laid_out(SideBySide(((name, x.numel()),)), "off")
            return self._vectors[name][1].settle(x) if name in self._vectors else x
        left = self.take(name)
        return x if left is None else x.add_(left.to(x.device))

    def take(self, name: str) -> Tensor | None:
        """Remove and return the residual of `name`; None if it has none."""
        if name in self._vectors:
            layout, residual = self._vectors[name]
            for each, value in layout.cut(residual.release()).items():
                self._waiting[each] = value
                self._vectors.pop(each)
                self._codecs.pop(each, None)
        if cut_off(self._waiting, name) and name.whole in self._resumed:  # type: ignore[attr-defined]
            self._resumed.add(name)
        return self._waiting.pop(name, None)

    def rescale(self, factor: float, loss_scale: float = 1.0) -> None:
        """Multiply the residual by `factor`, as its unit changed; between two exchanges."""
        if factor == 1.0:
            return
        for residual in {id(residual): residual for _, residual in self._vectors.values()}.values():
            residual.rescale(factor)
        for value in self._waiting.values():
            value.mul_(factor)

    def __bool__(self) -> bool:
        """Whether there may be a residual."""
        return bool(self._vectors or self._waiting)

    def commit(self) -> None:
        for _, residual in self._vectors.values():
            residual.commit()

    def roll_back(self) -> None:
        for _, residual in self._vectors.values():
            residual.roll_back()

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals by name: independent of codec, schedule and buckets."""
        found = {name: value.clone() for name, value in self._waiting.items()}
        for layout, residual in {id(pair): pair for pair in self._vectors.values()}.values():
            found.update({name: value.clone() for name, value in layout.cut(residual.total()).items()})
        return joined(found)

    def check_state(self, state: Mapping[str, Any], numels: Mapping[str, int] | None = None) -> None:
        """Refuse what is not float32 vectors by name, of these lengths where they are given."""
        check_named(state, numels, "residuals")

    def load_state_dict(self, state: Mapping[str, Tensor], *, resumed: bool = False) -> None:
        """Load residuals by name; vectors must be laid out again, `resumed`: exactly as they were."""
        self._vectors.clear()
        self._codecs.clear()
        self._waiting = {name: own_copy(value).reshape(-1) for name, value in state.items()}
        self._resumed = set(self._waiting) if resumed else set()

    def forget(self) -> None:
        """Drop all residuals."""
        self.load_state_dict({})


def _free_pages(values: Tensor) -> None:
    """Return the pages of `values`, which is no longer read, to the system.

    When DDP makes its buckets anew, one vector becomes parts of several, bucket by bucket. Without this it would stay
    resident until the last has taken its part.
    """
    if sys.platform != "linux" or values.device.type != "cpu" or not values.is_contiguous():
        return
    page = mmap.PAGESIZE
    first = -(-values.data_ptr() // page) * page
    nbytes = (values.data_ptr() + values.nbytes) // page * page - first
    if nbytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)
