"""WHAT IS SENT: every published way of saying less, behind one small interface (see `base.py`).

Importing this package imports every module beside it, so a codec is known as soon as its file exists; the kernels
inside are compiled at their first call, not here.

>>> import torch, laconic.codecs
>>> top1 = laconic.codecs.codec("topk(1)+fp16")
>>> payload = top1.encode(torch.tensor([0.5, -1.0]))
>>> top1.decode(payload, 2).tolist()
[0.0, -1.0]
"""

from __future__ import annotations

from laconic.codecs.base import Codec, get, names, register
from laconic.errors import BadInput
from laconic.registry import discover

__all__ = ["Codec", "codec", "get", "names", "register"]

discover(__name__, __path__)

from laconic.codecs.compose import parse  # noqa: E402  (a composition may name any codec imported above)


def codec(spec: str | Codec) -> Codec:
    """The codec a spec string names, `"topk(0.01)+qsgd(4)"`; a Codec is returned as it is.

    Args:
        spec: a name, `name(arg, key=value)`, or parts joined by `+`: selector + quantiser + `entropy`.

    Raises:
        UnknownName: no such codec or option; the message lists the valid ones.
        BadInput: the spec cannot be read, or its parts do not go together.

    >>> str(codec("qsgd( bits = 4 )"))
    'qsgd'
    """
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise BadInput(f"a codec is given as a spec string or a Codec, got {type(spec).__name__}")
    return parse(spec)
