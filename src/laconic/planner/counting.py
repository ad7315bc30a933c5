"""Cost of one of torch's operators: multiply-adds, work and depth, from its arguments.

Callers: `trace.py`, for every operator that a model runs. One multiply-add counts as one unit of work, as in the
survey; so does one elementwise operation. Operators that only move or name values cost nothing.

Source: Ben-Nun, Hoefler, Demystifying Parallel and Distributed Deep Learning, 2018, tables 4 and 6.
Differs: constants that the survey leaves in O(·) are spelt out: 3 for a normalisation, 4 for a softmax, a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
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


_Products = Callable[[Sequence[Any], Sequence[Tensor]], tuple[int, int]]  # multiply-adds and depth
QUANTIZED = ("linear_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic", "linear_relu_dynamic_fp16")
_CONVOLUTIONS = (
    "_convolution", "_slow_conv2d_forward", "convolution", "convolution_overrideable", "cudnn_convolution",
    "mkldnn_convolution",
)  # fmt: skip
# Names of operators that multiply and add; those of them that are not in _PRODUCTS are said to be uncounted.
_MULTIPLIES = re.compile(
    r"(?!upsample|_upsample)(\w*_)?((add|b|addb|baddb|s|hsp|sspadd)?mm|matmul|linear|\w*conv(olution)?(\dd|_tbc)?|attention|"
    r"rnn|lstm|gru|v?dot|(add)?mv|fft|linalg|cholesky|svd|qr|lu|solve|inverse|eig|[cp]?dist|bilinear|trilinear|addr|"
    r"matrix_exp|geqrf|orgqr|ormqr|encoder_layer)(_\w*)?"
)
_NO_PRODUCTS = re.compile(
    r"linalg_(vector_norm|_powsum|cross|diagonal)|_linalg_check_errors|fft_r?fftfreq|lu_unpack|slice_inverse|dist|"
    r"_thnn_fused_(lstm|gru)_cell\w*|_cudnn_rnn_flatten_weight|mkldnn_reorder_\w+"
)


class Counted(NamedTuple):
    """What an operator costs; depth is of its own graph. Not `whole`: its multiply-adds are not among it."""

    multiply_adds: int
    work: int
    depth: int
    whole: bool = True


NOTHING = Counted(0, 0, 0)


def count(operator: torch._ops.OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Counted:
    """The cost of an operator for these arguments and results."""
    space, _, name = operator._schema.name.partition("::")
    products = _products(name)
    if products is not None:
        macs, depth = products(args, outputs)
        return Counted(macs, macs, max(1, depth))
    if MOVES.fullmatch(name) or not outputs:
        return NOTHING
    return _of_values(name, args, outputs)._replace(whole=not is_uncounted(space, name, operator.tags))


def is_uncounted(space: str, name: str, tags: Collection[torch.Tag]) -> bool:
    """Whether an operator may multiply and add, and its products are not counted: listed by name beside the total."""
    if _products(name) is not None or torch.Tag.pointwise in tags:
        return False
    if space not in ("aten", "prims"):
        return True
    return _MULTIPLIES.fullmatch(name) is not None and _NO_PRODUCTS.fullmatch(name) is None


def _products(name: str) -> _Products | None:
    """What counts an operator's multiply-adds; one that writes in place costs what it costs otherwise."""
    if name.startswith("_scaled_dot_product"):
        return _attention_backward if name.endswith("_backward") else _attention
    return _PRODUCTS.get(name.removesuffix("_"))


def _of_values(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> Counted:
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


def _matrices(first: int) -> _Products:
    """A product of two matrices, or batches of them, the first of which is this argument."""

    def counted(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
        a, b = args[first : first + 2]
        columns = b.shape[-1] if b.dim() > 1 else 1
        stored = a.numel() if a.layout == torch.strided else a._nnz()  # only what is stored is multiplied
        return stored * columns, log2_ceiling(max(1, a.shape[-1]))

    return counted


def _transposed_matrix(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Inputs by a layer's weights, which have a row for each output."""
    return args[0].numel() * args[1].shape[0], log2_ceiling(max(1, args[0].shape[-1]))


def _packed_matrix(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Inputs by quantised weights, whose shape only the result tells."""
    return args[0].numel() * outputs[0].shape[-1], log2_ceiling(max(1, args[0].shape[-1]))


def _grouped_matrices(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Groups of rows, each by a matrix of its own (experts); or groups of columns, or of terms."""
    a, b = args[:2]
    macs = a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.dim() == b.dim() == 3 else 1)
    return macs, log2_ceiling(max(1, a.shape[-1]))


def _trilinear(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Products of three values each, summed: one for every place of the three tensors' common shape."""
    shapes = []
    for tensor, axes in zip(args[:3], args[3:6], strict=True):
        for axis in sorted(axes):
            tensor = tensor.unsqueeze(axis)
        shapes.append(tensor.shape)
    common = torch.broadcast_shapes(*shapes)
    return math.prod(common), log2_ceiling(max(1, math.prod(common[axis] for axis in args[6])))


def _distances(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Of every row of one matrix from every row of another: a square a value."""
    return args[0].numel() * args[1].shape[-2], log2_ceiling(max(1, args[0].shape[-1]))


def _convolution(x: Tensor, weight: Tensor, out_numel: int, transposed: bool) -> tuple[int, int]:
    """Every output value sums C/groups · Π kernel products; a transposed one spreads every input value as often."""
    terms = weight.numel() // weight.shape[0]
    macs = (x.numel() if transposed else out_numel) * terms
    return macs, log2_ceiling(weight.shape[1]) + sum(log2_ceiling(k) for k in weight.shape[2:])


def _forward_convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    return _convolution(args[0], args[1], outputs[0].numel(), len(args) > 6 and args[6] is True)


def _backward_convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    grad, x, weight, _, _, _, _, transposed, _, _, wanted = args[:11]
    macs, depth = _convolution(x, weight, grad.numel(), transposed)
    return macs * (wanted[0] + wanted[1]), depth


def _attention_products(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    """Products with keys, products with values, and the depth: two sums and a softmax."""
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    depth = log2_ceiling(query.shape[-1]) + 3 * log2_ceiling(key.shape[-2]) + 2
    return scores * query.shape[-1], scores * value.shape[-1], depth


def _attention(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    keys, values, depth = _attention_products(*args[:3])
    return keys + values, depth


def _attention_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """The scores are computed anew; then the gradients of values, scores, queries and keys."""
    keys, values, depth = _attention_products(*args[1:4])
    return 3 * keys + 2 * values, depth


def _attention_by_tokens(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Tensors of (batch, tokens, heads, width), not (batch, heads, tokens, width)."""
    return _attention([each.transpose(-3, -2) for each in args[:3]], outputs)


def _attention_by_tokens_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    return _attention_backward([each.transpose(-3, -2) for each in args[:4]], outputs)


def _native_attention(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """nn.MultiheadAttention in evaluation mode: the fused kernel."""
    query, key, width = args[0], args[1], args[3]
    tokens = query.numel() // query.shape[-1]
    macs = tokens * (3 * width * width + 2 * key.shape[-2] * width + width * width)
    return macs, 3 * log2_ceiling(width) + 2 * log2_ceiling(key.shape[-2]) + 4


def _encoder_layer(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """nn.TransformerEncoderLayer in evaluation mode: the fused kernel."""
    source, width, inner = args[0], args[1], args[14]
    macs, depth = _native_attention((source, source, source, width), outputs)
    return macs + 2 * source.numel() // source.shape[-1] * inner.numel(), depth + 2 * log2_ceiling(width) + 10


def _recurrent(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """One direction of one LSTM layer: its products with the inputs are side by side, those with the state in turn."""
    x, inner, outer = args[:3]
    steps, batch = x.shape[0], x.shape[1]
    return steps * batch * (inner.numel() + outer.numel()), steps * (log2_ceiling(outer.shape[-1]) + 6)


def _recurrent_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    macs, depth = _recurrent(args, outputs)
    return 2 * macs, depth


def _bag(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    weights, numbers, offsets = args[:3]
    return numbers.numel() * weights.shape[1], log2_ceiling(-(-numbers.numel() // max(1, offsets.numel())))


_PRODUCTS: dict[str, _Products] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_sparse_mm", "_int_mm", "_scaled_mm"), _matrices(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_sparse_addmm", "_addmm_activation"), _matrices(1)),
    **dict.fromkeys(("linear", "mkldnn_linear", "_weight_int8pack_mm"), _transposed_matrix),
    **dict.fromkeys(QUANTIZED, _packed_matrix),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"), _grouped_matrices),
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), _distances),
    **dict.fromkeys(_CONVOLUTIONS, _forward_convolution),
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), _attention_by_tokens),
    **dict.fromkeys(("_flash_attention_backward", "_efficient_attention_backward"), _attention_by_tokens_backward),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _bag),
    "_trilinear": _trilinear,
    "convolution_backward": _backward_convolution,
    "_native_multi_head_attention": _native_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
}  # fmt: skip
