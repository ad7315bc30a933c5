"""What the suites of operators run on: every registered method under each of its examples, and convolutions to try.

Registering a method is enough to be tested here; a class attribute `examples` names the specs that deserve it.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from laconic import operators
from laconic.operators import Convolution
from reference import convolution as reference

METHODS = [spec for name in operators.names() for spec in operators.examples(name)]
if not METHODS:
    raise ValueError("no convolution method is registered")


@st.composite
def convolutions(draw: st.DrawFn, dtype: str = "float32", axes: tuple[int, ...] = (1, 2), most: int = 4) -> Convolution:
    """A small convolution: any stride, padding, dilation and groups, often of the shapes that methods like."""
    count = draw(st.sampled_from(axes))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inner, outer = draw(st.integers(1, most)), draw(st.integers(1, most))
    if draw(st.booleans()):  # stride 1, square: what Winograd takes
        kernel = (draw(st.sampled_from([3, 3, 5, 1])),) * count
        stride = dilation = (1,) * count
    else:
        kernel = tuple(draw(st.integers(1, 5)) for _ in range(count))
        stride, dilation = (tuple(draw(st.integers(1, 3)) for _ in range(count)) for _ in range(2))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(count))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(1, r - 2 * p) + draw(st.integers(0, 18)) for r, p in zip(reach, padding, strict=True))
    return Convolution(draw(st.integers(1, 3)), groups * inner, groups * outer, size, kernel, stride, padding, dilation,
                       groups, dtype)  # fmt: skip


def fitted(conv: Convolution, spec: str) -> Convolution:
    """`conv`, or what is left of it that the method takes: two axes, stride 1, 3×3, no channel alone in its group."""
    method = operators.build(spec)
    if not method.refuses(conv):
        return conv
    flat = conv.planar()
    inner = max(2, flat.in_channels // flat.groups)
    size = tuple(n + 13 for n in flat.size)
    for groups in (flat.groups, 1):
        found = Convolution(flat.batch, inner * flat.groups, flat.out_channels, size, (3, 3), (1, 1), flat.padding,
                            (1, 1), groups, flat.dtype)  # fmt: skip
        if not method.refuses(found):
            break
    assert not method.refuses(found), method.refuses(found)
    return found


def operands(conv: Convolution, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weights and bias, normal."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (conv.input_shape, conv.weight_shape, (conv.out_channels,))
    x, w, b = (torch.randn(shape, generator=rng, dtype=torch.float64).to(conv.torch_dtype) for shape in shapes)
    return x, w, b


def options(conv: Convolution) -> dict:
    """What `convolve` and the reference take beside the tensors."""
    return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups}


def expected(conv: Convolution, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> np.ndarray:
    """The slow twin's output."""
    flat = conv.planar()
    y = reference.convolve(x.numpy().reshape(flat.input_shape), w.numpy().reshape(flat.weight_shape), **options(flat))
    y = y if b is None else y + b.numpy().astype(np.float64)[:, None, None]
    return y.reshape(conv.output_shape)


def allowed(conv: Convolution, bound: float, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> float:
    """The largest error a method states, for these values."""
    if conv.batch == 0:
        return 0.0
    largest = conv.terms * float(x.abs().max() * w.abs().max()) + (0.0 if b is None else float(b.abs().max()))
    return bound * torch.finfo(conv.torch_dtype).eps / 2 * largest
