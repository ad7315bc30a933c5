"""What one of torch's operators costs: multiply-adds, work and depth, from its arguments.

Callers: `trace.py`, for every operator that a model runs. One multiply-add counts as one unit of work, as in the
survey; so does one elementwise operation. What only moves or names values costs nothing.

Source: Ben-Nun, Hoefler, Demystifying Parallel and Distributed Deep Learning, 2018, tables 4 and 6.
Differs: constants that the survey leaves in O(·) are spelt out: 3 for a normalisation, 4 for a softmax, a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.operators.method import log2_ceiling

MOVES = re.compile(
    r"(new_|_?to_|_to_copy|_unsafe_|unsafe_)?(empty|zeros|ones|full|arange|view|copy|reshape|split|chunk)\w*|detach\w*|"
    r"clone|contiguous|cat|stack|slice\w*|select\w*|expand|permute|transpose|t|squeeze|unsqueeze|unbind|as_strided\w*|"
    r"alias|copy_|fill_|zero_|constant_pad_nd|reflection_pad\w*|replicate_pad\w*|embedding|index\w*|gather|scatter\w*|"
    r"scalar_tensor|lift_fresh|tril|triu|flip|roll|unfold|im2col|pixel_(un)?shuffle|channel_shuffle|repeat\w*|"
    r"_local_scalar_dense|device|is_\w+|_pin_memory|resize_|set_|record_stream|_has_compatible_shallow_copy_type"
)
NORMS = re.compile(r"(native|cudnn|miopen|_native)?_?(batch|layer|group|instance)_norm\w*|_batch_norm_with_update\w*")


class Counted(NamedTuple):
    """What an operator costs; depth is of its own graph."""

    multiply_adds: int
    work: int
    depth: int


NOTHING = Counted(0, 0, 0)


def count(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> Counted:
    """The cost of the operator `name`, without its namespace, for these arguments and results."""
    products = _PRODUCTS.get(name)
    if products is None and name.startswith("_scaled_dot_product"):
        products = _attention_backward if name.endswith("_backward") else _attention
    if products is not None:
        macs, depth = products(args)
        return Counted(macs, macs, max(1, depth))
    if MOVES.fullmatch(name) or not outputs:
        return NOTHING
    made = outputs[0].numel()
    read = max((a.numel() for a in args if isinstance(a, Tensor)), default=made)
    if NORMS.fullmatch(name) and not name.endswith("_backward"):
        return _norm(name, args, outputs)
    if "softmax" in name:
        along = args[0].shape[args[1]] if isinstance(args[1], int) else made
        return Counted(0, 4 * made, 2 * log2_ceiling(max(1, along)) + 2)
    if "pool" in name and not name.endswith("_backward"):
        window = math.prod(_each(args[1], 2)) if not name.startswith("_adaptive") and len(args) > 1 else read // made
        return Counted(0, made * max(1, window), max(1, log2_ceiling(max(1, window))))
    if 0 < made < read:  # a sum, mean or maximum
        return Counted(0, read, log2_ceiling(-(-read // made)))
    return Counted(0, made, 1)


def _each(value: int | Sequence[int], axes: int) -> Sequence[int]:
    return [value] * axes if isinstance(value, int) else value


def _norm(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> Counted:
    x = args[0]
    if "batch_norm" in name and len(outputs) > 1 and not outputs[1].numel():  # evaluation: one multiply-add a value
        return Counted(0, x.numel(), 1)
    values = x.numel() // max(1, outputs[1].numel() if len(outputs) > 1 else x.shape[1])
    return Counted(0, 3 * x.numel(), 2 * log2_ceiling(max(1, values)) + 2)


def _mm(a: Tensor, b: Tensor) -> tuple[int, int]:
    columns = b.shape[-1] if b.dim() > 1 else 1
    stored = a.numel() if a.layout == torch.strided else a._nnz()  # of a sparse one only what is stored is multiplied
    return stored * columns, log2_ceiling(max(1, a.shape[-1]))


def _convolution(x: Tensor, weight: Tensor, out_numel: int, transposed: bool) -> tuple[int, int]:
    """Every output value sums C/groups · Π kernel products; a transposed one spreads every input value as often."""
    terms = weight.numel() // weight.shape[0]
    macs = (x.numel() if transposed else out_numel) * terms
    return macs, log2_ceiling(weight.shape[1]) + sum(log2_ceiling(k) for k in weight.shape[2:])


def _forward_convolution(args: Sequence[Any]) -> tuple[int, int]:
    x, weight, _, stride, padding, dilation, transposed = args[:7]
    return _convolution(x, weight, _convolved(x, weight, stride, padding, dilation), transposed)


def _convolved(x: Tensor, weight: Tensor, *options: Sequence[int]) -> int:
    """Values of the output; options: stride, padding, dilation."""
    stride, padding, dilation = options
    axes = weight.dim() - 2
    every = zip(x.shape[-axes:], weight.shape[2:], _all(stride, axes), _all(padding, axes), _all(dilation, axes),
                strict=True)  # fmt: skip
    size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in every]
    return (x.shape[0] if x.dim() == weight.dim() else 1) * weight.shape[0] * math.prod(size)


def _all(values: Sequence[int], axes: int) -> Sequence[int]:
    return list(values) * axes if len(values) == 1 else values


def _backward_convolution(args: Sequence[Any]) -> tuple[int, int]:
    grad, x, weight, _, _, _, _, transposed, _, _, wanted = args[:11]
    macs, depth = _convolution(x, weight, grad.numel(), transposed)
    return macs * (wanted[0] + wanted[1]), depth


def _attention_products(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    """Products with keys, products with values, and the depth: two sums and a softmax."""
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    depth = log2_ceiling(query.shape[-1]) + 3 * log2_ceiling(key.shape[-2]) + 2
    return scores * query.shape[-1], scores * value.shape[-1], depth


def _attention(args: Sequence[Any]) -> tuple[int, int]:
    keys, values, depth = _attention_products(*args[:3])
    return keys + values, depth


def _attention_backward(args: Sequence[Any]) -> tuple[int, int]:
    """The scores are computed anew; then the gradients of values, scores, queries and keys."""
    keys, values, depth = _attention_products(*args[1:4])
    return 3 * keys + 2 * values, depth


def _native_attention(args: Sequence[Any]) -> tuple[int, int]:
    """nn.MultiheadAttention in evaluation mode: the fused kernel."""
    query, key, width = args[0], args[1], args[3]
    tokens = query.numel() // query.shape[-1]
    macs = tokens * (3 * width * width + 2 * key.shape[-2] * width + width * width)
    return macs, 3 * log2_ceiling(width) + 2 * log2_ceiling(key.shape[-2]) + 4


def _encoder_layer(args: Sequence[Any]) -> tuple[int, int]:
    """nn.TransformerEncoderLayer in evaluation mode: the fused kernel."""
    source, width, inner = args[0], args[1], args[14]
    macs, depth = _native_attention((source, source, source, width))
    return macs + 2 * source.numel() // source.shape[-1] * inner.numel(), depth + 2 * log2_ceiling(width) + 10


def _recurrent(args: Sequence[Any]) -> tuple[int, int]:
    """One direction of one LSTM layer: its products with the inputs are side by side, those with the state in turn."""
    x, inner, outer = args[:3]
    steps, batch = x.shape[0], x.shape[1]
    return steps * batch * (inner.numel() + outer.numel()), steps * (log2_ceiling(outer.shape[-1]) + 6)


def _recurrent_backward(args: Sequence[Any]) -> tuple[int, int]:
    macs, depth = _recurrent(args)
    return 2 * macs, depth


def _bag(args: Sequence[Any]) -> tuple[int, int]:
    weights, numbers, offsets = args[:3]
    return numbers.numel() * weights.shape[1], log2_ceiling(-(-numbers.numel() // max(1, offsets.numel())))


_PRODUCTS: dict[str, Callable[[Sequence[Any]], tuple[int, int]]] = {
    "mm": lambda a: _mm(a[0], a[1]), "bmm": lambda a: _mm(a[0], a[1]), "mv": lambda a: _mm(a[0], a[1]),
    "dot": lambda a: _mm(a[0], a[1]), "vdot": lambda a: _mm(a[0], a[1]), "_sparse_mm": lambda a: _mm(a[0], a[1]),
    "addmm": lambda a: _mm(a[1], a[2]), "baddbmm": lambda a: _mm(a[1], a[2]), "addmv": lambda a: _mm(a[1], a[2]),
    "_sparse_addmm": lambda a: _mm(a[1], a[2]), "addmm_": lambda a: _mm(a[1], a[2]),
    "linear": lambda a: _mm(a[0], a[1].t()), "_int_mm": lambda a: _mm(a[0], a[1]),
    "convolution": _forward_convolution, "convolution_overrideable": _forward_convolution,
    "convolution_backward": _backward_convolution, "_native_multi_head_attention": _native_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer, "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward, "_embedding_bag": _bag, "_embedding_bag_forward_only": _bag,
}  # fmt: skip
