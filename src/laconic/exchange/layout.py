"""What a bucket of gradients holds, which parameters a codec may touch, and gradients laid out in flat buffers.

Callers: `state.py`, every kind of bucket, and `consistency`. Everything is known by parameter name, since DDP rebuilds
its buckets after the first step. A large gradient may travel in several buckets, each with a residual of its own: its
parts have names, too, but checkpoints know whole parameters only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.specs import check_kinds

ALIGNED = 4096  # values: sections of a buffer begin at multiples, where blocks of codecs and vectors of kernels do too
BUCKET_NBYTES = 4 << 20  # of a flat vector: one bucket is encoded while another is on the wire
FEW_NBYTES = 1 << 16  # of all exempt gradients together: a message of less costs mostly its latency


@dataclass(frozen=True)
class Exemptions:
    """A parameter is exempt, i.e. sent in float32, when it is a vector, small, or its name matches.

    Args:
        vectors: exempt parameters with fewer than two dimensions (biases, norms).
        smaller_than: exempt parameters with fewer values than this.
        names: regular expressions; a parameter is exempt when one of them is found anywhere in its name, as the model
            itself (ddp.module) names it.

    >>> rule = Exemptions(names=("head",))
    >>> rule.smaller_than
    1024
    """

    vectors: bool = True
    smaller_than: int = 1024
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_kinds("exempt", Exemptions, vars(self))
        for pattern in self.names:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"exempt: '{pattern}' is not a regular expression: {error}") from error

    def check(self, parameters: Iterable[str]) -> None:
        """Refuse a pattern that matches no name: with a typo, exempt parameters would be compressed."""
        known = list(parameters)
        for pattern in self.names:
            if not any(re.search(pattern, name) for name in known):
                shown = ", ".join(known[:6]) + (", …" if len(known) > 6 else "")
                raise BadInput(f"exempt: '{pattern}' is found in no parameter's name; the names: {shown}")

    def covers(self, name: str, parameter: Tensor) -> bool:
        """Whether this parameter is sent exactly."""
        if (self.vectors and parameter.dim() < 2) or parameter.numel() < self.smaller_than:
            return True
        return any(re.search(pattern, name) for pattern in self.names)


def exemptions(exempt: Exemptions | Sequence[str] | None) -> Exemptions:
    """Exemptions from what a user gives: None for the defaults, a list of names to add to them, or the whole."""
    if isinstance(exempt, Exemptions):
        return exempt
    if isinstance(exempt, str):
        return Exemptions(names=(exempt,))
    if exempt is not None and not (isinstance(exempt, Sequence) and all(isinstance(name, str) for name in exempt)):
        raise BadInput(f"exempt is a list of names (regular expressions) or Exemptions(…), got {exempt!r}")
    return Exemptions(names=tuple(exempt or ()))


class PartName(str):
    """The name of values `start` to `stop` of parameter `whole`, which has `numel` values.

    >>> PartName.of("fc.weight", 0, 512, 1024)
    'fc.weight[0:512]'
    """

    whole: str
    start: int
    stop: int
    numel: int

    @classmethod
    def of(cls, whole: str, start: int, stop: int, numel: int) -> PartName:
        name = cls(f"{whole}[{start}:{stop}]")
        name.whole, name.start, name.stop, name.numel = whole, start, stop, numel
        return name


def joined(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values by parameter; those of parts are put in their places, with zeros beside them.

    >>> joined({PartName.of("w", 1, 3, 4): torch.tensor([5.0, 6.0])})
    {'w': tensor([0., 5., 6., 0.])}
    """
    found = {name: value for name, value in values.items() if not isinstance(name, PartName)}
    for name, value in values.items():
        if isinstance(name, PartName):
            whole = found.setdefault(name.whole, torch.zeros(name.numel))
            whole[name.start : name.stop] = value
    return found


def cut_off(values: dict[str, Tensor], name: str) -> bool:
    """Move a part out of its parameter's entry in `values`, into its own; zeros stay behind."""
    if not isinstance(name, PartName) or name in values or name.whole not in values:
        return False
    rest = values[name.whole][name.start : name.stop]
    values[name] = rest.clone()
    rest.zero_()
    if not values[name.whole].any():
        del values[name.whole]
    return True


@dataclass(frozen=True)
class Entry:
    """A parameter's part of its bucket."""

    name: str
    start: int
    stop: int
    exempt: bool
    shape: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class BucketInfo:
    """The parameters in the order they lie in a bucket, the bucket's length and its type."""

    entries: tuple[Entry, ...]
    numel: int
    dtype: torch.dtype = torch.float32


@dataclass(eq=False)
class Gradients:
    """A bucket's gradients in transit: the buffer, the bucket's number, the parameters and the step.

    The buffer may begin inside the parameters, after `start` of their values, and end before they do.
    """

    buffer: Tensor
    index: int
    parameters: Sequence[Tensor]
    step: int
    last: bool  # of the step's buckets, in the order they are sent
    future: Any = None
    first: bool = False
    start: int = 0
    made: float = field(default_factory=time.perf_counter)  # when the gradients were there, or the stream was told
    event: Any = None  # on a device: when they are there
    pinned: Tensor | None = None  # where they are while they are exchanged, if not in the buffer
    stays: bool = False  # on a device: they are encoded there, and only payloads cross
    returned: Any = None  # on a device: when the means are there

    def __post_init__(self) -> None:
        if not self.buffer.is_cpu:
            from laconic.codecs.device.streams import mark

            self.event = mark(self.buffer)

    @property
    def layout(self) -> tuple[int, tuple[int, ...]]:
        """The buffer's layout; it changes on all ranks at once."""
        return self.buffer.numel(), (self.start, *map(id, self.parameters))


class Parameters:
    """A model's parameters: their names, and which are sent exactly; BadInput for an exemption that no name matches.

    Parameters that are not among `named` are numbered as they are met.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], exempt: Exemptions) -> None:
        listed = list(named)
        if strange := [each for each in listed if not isinstance(each, tuple)]:
            text = f"got {type(strange[0]).__name__} for a pair of name and parameter"
            raise BadInput(f"give the parameters with their names, model.named_parameters(): {text}")
        self.names = {id(parameter): name for name, parameter in listed}
        self.exempt = exempt
        self.known = {name: parameter.numel() for name, parameter in listed} or None  # how many values each has
        if exempt.names and self.known is None:
            raise BadInput("exempt by name needs the parameters' names: give named_parameters=model.named_parameters()")
        exempt.check(self.names.values())
        self._infos: dict[int, tuple[object, BucketInfo]] = {}
        self._count = 0
        self._former: list[list[str]] = []

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Add these parameters."""
        for name, parameter in named:
            self.names[id(parameter)] = name
            self.known = {**(self.known or {}), name: parameter.numel()}

    def covers(self, parameter: Tensor) -> bool:
        return self.exempt.covers(self.names[id(parameter)], parameter)

    def info(self, gradients: Gradients) -> BucketInfo:
        """The layout of this bucket; recomputed only if the bucket changed since the last step."""
        layout = gradients.layout
        found = self._infos.get(gradients.index)
        if found is None or found[0] != layout:
            found = self._infos[gradients.index] = (layout, self._worked_out(gradients))
        return found[1]

    def names_in(self, index: int) -> list[str]:
        """The names of the parameters in the bucket of this number."""
        return [entry.name for entry in self._infos[index][1].entries] if index in self._infos else []

    def bucket_of(self, name: str) -> int:
        """The number of the bucket that a parameter is in; 0 where it has not been sent yet."""
        found = (i for i, (_, info) in self._infos.items() if any(entry.name == name for entry in info.entries))
        return next(found, 0)

    def note_last(self, index: int) -> None:
        """Note the number of DDP's last bucket of a step."""
        self._count = index + 1

    @property
    def buckets(self) -> list[list[str]]:
        """The names in each of DDP's buckets at the last step, in order; before the first, those that were restored."""
        if self._count == 0 or not self._infos.keys() >= set(range(self._count)):
            return self._former
        return [[entry.name for entry in self._infos[index][1].entries] for index in range(self._count)]

    def restore(self, buckets: list[list[str]]) -> None:
        """Start over with the buckets of another job's last step."""
        self._infos.clear()
        self._count, self._former = 0, buckets

    def _worked_out(self, gradients: Gradients) -> BucketInfo:
        entries, begun, numel = [], -gradients.start, gradients.buffer.numel()
        for parameter in gradients.parameters:
            name = self.names.setdefault(id(parameter), f"parameter{len(self.names)}")
            exempt, ended = self.exempt.covers(name, parameter), begun + parameter.numel()
            start, stop = max(0, begun), min(numel, ended)
            if stop - start == parameter.numel():
                entries.append(Entry(name, start, stop, exempt, tuple(parameter.shape)))
            elif start < stop:
                part = PartName.of(name, start - begun, stop - begun, parameter.numel())
                entries.append(Entry(part, start, stop, exempt, (stop - start,)))
            begun = ended
        return BucketInfo(tuple(entries), numel, gradients.buffer.dtype)


@dataclass(frozen=True)
class FlatBuffer:
    """One buffer and the parameters whose gradients lie in it, in order."""

    values: Tensor
    parameters: tuple[nn.Parameter, ...]
    views: tuple[Tensor, ...]

    def check(self) -> None:
        """Refuse to go on if the gradients were moved, as by converting the model."""
        at = self.values.data_ptr()
        for view in self.views:
            if view.numel() and view.data_ptr() != at:
                text = "convert it (model.to, .half, .double …) before, or when its gradients are None"
                raise BadInput(f"the model was converted after distribute(), while it had gradients; {text}")
            at += view.nbytes


def equal_slices(numel: int, itemsize: int, nbytes: int | None) -> list[tuple[int, int]]:
    """Where sections of about `nbytes` of `numel` values begin and end, each at a multiple of ALIGNED; one if None.

    >>> equal_slices(10_000, 4, 20_000)
    [(0, 8192), (8192, 10000)]
    """
    count = 1 if nbytes is None else max(1, round(numel * itemsize / max(1, nbytes)))
    size = max(1, -(-numel // (count * ALIGNED))) * ALIGNED
    return [(at, min(numel, at + size)) for at in range(0, max(1, numel), size)]


class FlatGradients:
    """Flat buffers of about `nbytes` for the gradients of these parameters, in the order backward makes them.

    Parameters that need no gradient are left out; exempt ones, which are sent exactly, lie at the end of their buffer.
    With `follow` gradients are moved to their places as they are made.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        nbytes: int,
        exempt: Callable[[nn.Parameter], bool],
        *,
        follow: bool = True,
    ) -> None:
        self.buffers = [flat(sorted(group, key=exempt)) for group in in_groups(parameters, nbytes, exempt)]
        self._places = places_in(self.buffers)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._place)
            for buffer in self.buffers
            for parameter in buffer.parameters
            if follow
        ]

    def _place(self, parameter: Tensor) -> None:
        """Move a new gradient to its place; a sparse one is dense there."""
        view, gradient = self._places[id(parameter)], parameter.grad
        if gradient is not None and not lies_in(gradient, view):
            write(gradient, view)
            parameter.grad = view

    def holds(self, parameter: Tensor) -> bool:
        """Whether this parameter's gradient has a place."""
        return id(parameter) in self._places

    def complete(self) -> None:
        """Fill in zeros where this rank has made no gradient: another may have."""
        for buffer in self.buffers:
            buffer.check()
            for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                    parameter.grad = view
                else:
                    self._place(parameter)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


def places_in(buffers: Iterable[FlatBuffer]) -> dict[int, Tensor]:
    """The place of each parameter's gradient, by the parameter's id."""
    return {id(p): view for b in buffers for p, view in zip(b.parameters, b.views, strict=True)}


class SetAside:
    """Hides the gradients of parameters until `restore`, so that an optimiser skips them."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._kept = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in self._kept:
            parameter.grad = None

    def restore(self) -> None:
        """Restore the gradients, replacing any made since."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient


def divides_first(gradients: Tensor) -> bool:
    """Whether ranks divide these gradients before they add them, in their own type, as DDP does.

    True for half floats, whose sum may overflow where the mean does not; others are added first.
    """
    return gradients.itemsize < 4


def lies_in(gradient: Tensor, view: Tensor) -> bool:
    """Whether a gradient is at its place already."""
    return not gradient.is_sparse and gradient.data_ptr() == view.data_ptr()


def write(gradient: Tensor | None, view: Tensor) -> None:
    """Copy a gradient to its place; zeros where there is none."""
    with torch.no_grad():  # a gradient may have one itself
        if gradient is None or gradient.is_sparse:
            view.zero_()
        if gradient is not None:
            view.add_(gradient) if gradient.is_sparse else view.copy_(gradient)


def in_groups(
    parameters: Sequence[nn.Parameter], nbytes: int, exempt: Callable[[nn.Parameter], bool]
) -> list[list[nn.Parameter]]:
    """Those that need gradients, in the order backward makes them, in groups of one dtype and about `nbytes`.

    Where all exempt ones are few, as biases are, they lie in the last group: each group with exempt values would encode
    and decode a second, tiny payload.
    """
    made = [p for p in reversed(parameters) if p.requires_grad]
    last = [p for p in made if exempt(p)]
    if sum(4 * p.numel() for p in last) > FEW_NBYTES or len(last) == len(made) or len(set(map(_kind, made))) > 1:
        last = []
    held, groups = set(map(id, last)), list[list[nn.Parameter]]([[]])
    for parameter in (p for p in made if id(p) not in held):
        alike = not groups[-1] or _kind(groups[-1][0]) == _kind(parameter)
        if not alike or sum(4 * p.numel() for p in groups[-1]) >= nbytes:
            groups.append([])
        groups[-1].append(parameter)
    groups[-1] += last
    return [group for group in groups if group]


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def flat(parameters: Sequence[nn.Parameter]) -> FlatBuffer:
    """A buffer of zeros with a place for each of these parameters' gradients."""
    like = parameters[0]
    values = torch.zeros(sum(p.numel() for p in parameters), dtype=like.dtype, device=like.device)
    parts = torch.split(values, [p.numel() for p in parameters])
    views = tuple(part.view(p.shape) for part, p in zip(parts, parameters, strict=True))
    return FlatBuffer(values, tuple(parameters), views)


def neighbours(parameters: Iterable[nn.Parameter], nbytes: int = BUCKET_NBYTES) -> Iterator[tuple[int, list[Tensor]]]:
    """Divide a flat vector of these parameters into buckets of at least so many bytes: values and parameters of each.

    >>> [numel for numel, _ in neighbours([nn.Parameter(torch.ones(n)) for n in (3, 4, 2)], nbytes=20)]
    [7, 2]
    """
    numel, held = 0, list[Tensor]()
    for parameter in parameters:
        numel, held = numel + parameter.numel(), [*held, parameter]
        if 4 * numel >= nbytes:
            yield numel, held
            numel, held = 0, []
    if held:
        yield numel, held
