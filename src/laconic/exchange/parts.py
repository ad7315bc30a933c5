"""Names for parts of a parameter: a large gradient may travel in several buckets, each with a residual of its own.

Callers: `layout.py` and `residuals.py`. Checkpoints know whole parameters only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class PartName(str):
    """What values `start` to `stop` of parameter `whole`, which has `numel` of them, are called.

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
    """Let a part have a place of its own among `values`, where its parameter has one; zeros stay behind."""
    if not isinstance(name, PartName) or name in values or name.whole not in values:
        return False
    rest = values[name.whole][name.start : name.stop]
    values[name] = rest.clone()
    rest.zero_()
    if not values[name.whole].any():
        del values[name.whole]
    return True
