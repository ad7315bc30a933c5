"""WHAT IS SENT: published gradient compression methods, behind one small interface (see `base.py`).

Every file here is registered automatically: all are imported when a codec is first looked up by name. Kernels are
compiled at their first call.

>>> import torch, laconic.codecs
>>> top1 = laconic.codecs.codec("topk(1)+fp16")
>>> payload = top1.encode(torch.tensor([0.5, -1.0]))
>>> top1.decode(payload, 2).tolist()
[0.0, -1.0]
"""

from __future__ import annotations

from laconic.codecs.base import Codec, get, names, register
from laconic.errors import BadInput

__all__ = ["Codec", "codec", "get", "names", "register", "simplest_spec"]


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
    from laconic.codecs.compose import parse

    return parse(spec)


def simplest_spec(name: str) -> str:
    """The bare name when the codec has defaults for everything, else its first example."""
    try:
        return str(codec(name))
    except BadInput:
        examples: tuple[str, ...] = getattr(get(name), "examples", ())
        if not examples:
            raise
        return examples[0]
