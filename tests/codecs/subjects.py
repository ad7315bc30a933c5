"""What the shared codec tests run on: every registered vector codec, some compositions, and difficult values.

Registering a codec is enough to be tested here. A codec that needs arguments, or whose options deserve testing, says
so with a class attribute `examples: ClassVar[tuple[str, ...]]` of spec strings.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import numpy as np
import torch
from hypothesis import strategies as st

from laconic import codecs
from laconic.codecs import Codec

VECTOR_KINDS = ("quantiser", "selector", "rotation", "lossless")
COMPOSITIONS = (
    "topk(0.05)+qsgd(4)",
    "topk(16, bucket=512)+linear8",
    "randomk(0.1)+ternary",
    "randomk(0.1, scaled=true)+qsgd(4)",
    "randomk(0.1, scaled=true)+natural",
    "threshold(0.5)+onebit",
    "topk(64, bucket=4096)+int2",
    "hadamard(256)+qsgd(4)",
    "hadamard+int4+entropy",
    "dynamic8+entropy",
    "onebit+entropy",
    "topk(0.05)+qsgd(4)+entropy",
)


def specs_of(name: str) -> list[str]:
    """The specs under which a registered codec is tested; at least one, or the suite does not even collect."""
    specs = list(getattr(codecs.get(name), "examples", ()) or (name,))
    for spec in specs:
        built = codecs.codec(spec)
        if built.name != name:
            raise ValueError(f"{spec!r} is an example of codec {name!r} but builds {built.name!r}")
    return specs


def parts(spec: str) -> list[str]:
    """The names in a spec, without their options: ["topk", "qsgd"]. `entropy` alone is that of plain floats."""
    return re.sub(r"\([^)]*\)", "", str(codecs.codec(spec))).split("+")


SINGLE = [spec for name in codecs.names() if codecs.get(name).kind in VECTOR_KINDS for spec in specs_of(name)]
if not SINGLE:
    raise ValueError("no codec is registered")
ALL = [*SINGLE, *COMPOSITIONS]

# Around bytes, words, buckets of 512, blocks of 4096, and the empty and nearly empty.
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 64, 65, 255, 257, 511, 512, 513, 1025, 4095, 4096, 4097, 8193)

MODEST = ("normal", "uniform", "zeros", "constant", "sparse", "one_hot", "mixed")
EXTREME = ("denormal", "huge", "negative_zero")


def values(kind: str, numel: int, seed: int) -> torch.Tensor:
    """`numel` float32 values of a named character."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(numel)
    if kind == "normal":
        x = normal * 10.0 ** rng.integers(-3, 3)
    elif kind == "uniform":
        x = rng.random(numel)
    elif kind == "zeros":
        x = np.zeros(numel)
    elif kind == "negative_zero":
        x = np.where(normal < 0, -0.0, 0.0)
    elif kind == "constant":
        x = np.full(numel, rng.standard_normal())
    elif kind == "sparse":
        x = np.where(rng.random(numel) < 0.05, normal, 0.0)
    elif kind == "one_hot":
        x = np.zeros(numel)
        x[: min(numel, 1)] = -3.0
        rng.shuffle(x)
    elif kind == "mixed":
        x = np.sign(normal) * 10.0 ** rng.uniform(-12, 3, numel)
    elif kind == "denormal":
        x = normal * 1e-40
    elif kind == "huge":
        x = np.clip(normal, -3.4, 3.4) * 1e38
    else:
        raise ValueError(kind)
    return torch.from_numpy(x.astype(np.float32))


@st.composite
def tensors(draw: st.DrawFn, kinds: tuple[str, ...] = MODEST + EXTREME, sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    """A 1-D float32 tensor."""
    numel = draw(st.one_of(st.sampled_from(sizes), st.integers(0, max(sizes))))
    return values(draw(st.sampled_from(kinds)), numel, draw(st.integers(0, 2**32 - 1)))


def reference(codec: Codec, step: int, numel: int):
    """The codec's slow twin: (encode_body(x) -> uint8 array, decode_body(body) -> float32 array)."""
    module = importlib.import_module(f"reference.codec_{codec.name}")
    parameters = {f.name: getattr(codec, f.name) for f in dataclasses.fields(codec) if f.init and f.name != "seed"}
    extra = {}
    if codec.stochastic:
        twin = importlib.import_module("reference.counter_random")
        # A reference that needs other than one draw per element asks for the key itself.
        if "key" in inspect.signature(module.encode_body).parameters:
            extra["key"] = twin.key(codec.seed, step)
        else:
            extra["draws"] = twin.draws(codec.seed, step, numel)
    return (
        lambda x: module.encode_body(x, **parameters, **extra),
        lambda body: module.decode_body(body, numel, **parameters),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits: tells −0 from 0 and compares NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
