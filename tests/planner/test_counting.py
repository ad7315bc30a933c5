"""Multiply-adds of torch's operators, against torch's own counter and hand counts, and those that are not counted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from laconic.planner.cost import cost
from laconic.planner.counting import is_uncounted


class Calls(nn.Module):
    """A model that only calls a function, with a weight of the shape given."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def offsets(x: Tensor) -> Tensor:
    return torch.tensor([1, 4, 6], dtype=torch.int32, device=x.device)


# (a model, the shape of its input, multiply-adds by hand); torch's counter knows the first group
KNOWN_TO_TORCH: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "mm": (Calls(lambda x, w: x @ w, 4, 5), (6, 4), 6 * 4 * 5),
    "addmm": (nn.Linear(4, 5), (6, 4), 6 * 4 * 5),
    "bmm": (Calls(lambda x, w: torch.bmm(x, w), 3, 4, 5), (3, 6, 4), 3 * 6 * 4 * 5),
    "baddbmm": (Calls(lambda x, w: torch.baddbmm(x.new_zeros(3, 6, 5), x, w), 3, 4, 5), (3, 6, 4), 3 * 6 * 4 * 5),
    "einsum": (Calls(lambda x, w: torch.einsum("nij,jk->nik", x, w), 4, 5), (3, 6, 4), 3 * 6 * 4 * 5),
    "matmul": (Calls(lambda x, w: x @ w, 4, 5), (3, 6, 4), 3 * 6 * 4 * 5),
    "conv1d": (nn.Conv1d(4, 6, 3), (2, 4, 9), 2 * 6 * 7 * 4 * 3),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 9, 9), 2 * 6 * 81 * 2 * 9),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), 2 * 3 * 27 * 2 * 8),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5), 2 * 4 * 25 * 6 * 9),
}
UNKNOWN_TO_TORCH: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "addmm_": (Calls(lambda x, w: x.new_zeros(6, 5).addmm_(x, w), 4, 5), (6, 4), 6 * 4 * 5),
    "addbmm": (Calls(lambda x, w: torch.addbmm(x.new_zeros(6, 5), x, w), 4, 4, 5), (4, 6, 4), 4 * 6 * 4 * 5),
    "mv": (Calls(lambda x, w: x.mv(w), 4), (6, 4), 6 * 4),
    "bilinear": (Calls(lambda x, w: functional.bilinear(x, x, w), 10, 12, 12), (3, 12), 3 * 10 * 12 * 12),
    "linear_dynamic": (torch.ao.nn.quantized.dynamic.Linear(8, 6), (4, 8), 4 * 8 * 6),
    "experts": (
        Calls(lambda x, w: functional.grouped_mm(x, w, offs=offsets(x)), 3, 16, 32), (6, 16), 6 * 16 * 32
    ),
    "cdist": (Calls(lambda x, w: torch.cdist(x, w), 7, 4), (6, 4), 6 * 7 * 4),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN_TO_TORCH)
def test_operators_that_torch_counts(name: str) -> None:
    model, shape, expected = KNOWN_TO_TORCH[name]
    found = cost(model, shape[0], shape[1:], "float32", train=False)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(shape))
    assert (found.total("multiply_adds"), found.uncounted) == (expected, ())
    assert counter.get_total_flops() == 2 * expected


@pytest.mark.parametrize("name", UNKNOWN_TO_TORCH)
def test_operators_that_torch_does_not_count(name: str) -> None:
    model, shape, expected = UNKNOWN_TO_TORCH[name]
    found = cost(model, shape[0], shape[1:], "float32", train=False)
    assert (found.total("multiply_adds"), found.uncounted) == (expected, ())


def test_what_is_not_counted_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda x, w: torch.linalg.qr(x @ w).R, 4, 4))
    found = cost(model, 4, (4,))
    assert found.total("multiply_adds") == 2 * 4 * 4 * 4
    assert "aten::linalg_qr" in found.uncounted
    assert "aten::linalg_qr" in found.to_dict()["uncounted"]


def aten(tag: Callable[[str, torch._ops.OpOverload], bool]) -> set[str]:
    """Names of torch's operators that have a kernel of their own and for which `tag` holds."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or overload.endswith("out"):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        found |= {base} if tag(base, operator) else set()
    return found


# Of decompositions, equations and transforms no multiply-adds are counted; nor of kernels that are not a processor's,
# or for formats (4 bits, semi-structured, nested) that are rarely seen. All are named when a model uses them.
UNCOUNTED = re.compile(
    r"_?linalg_\w+|_?cholesky\w*|_fft_\w+|triangular_solve|geqrf|ormqr|_pdist\w*|_cdist_backward|_compute_linear_combination|"
    r"_?(cudnn|miopen|mps|nnpack|cslt|triton|dyn_quant|mixed_dtypes|sparse_semi_structured)_\w+|"
    r"mkldnn_linear_backward\w*|(linear|matmul|convolution)_backward(_overrideable)?|_slow_conv2d_backward|"
    r"slow_conv(3d|_dilated[23]d|_transpose[23]d)\w*|conv_(tbc|depthwise3d)|_conv_depthwise2d|quantized_(gru|lstm)|"
    r"_weight_int4pack_mm\w*|_scaled_(grouped_)?mm_v2|_foreach_mm|addr|hspmm|sparse_sampled_addmm|_sparse_sparse_matmul|"
    r"_sparse_mm_reduce_impl\w*|_flash_attention_forward_no_dropout_inplace|_?lstm_mps\w*"
)


def test_every_operator_of_torch_that_multiplies_is_known() -> None:
    """A new one of torch's fails here: count it, or add it to those that are named."""
    uncounted = aten(lambda name, operator: is_uncounted("aten", name, operator.tags))
    assert {name.rstrip("_") for name in uncounted if not UNCOUNTED.fullmatch(name.rstrip("_"))} == set()
    assert len(uncounted) > 50  # the list was read


def test_all_that_torch_counts_is_counted() -> None:
    names = {str(each).removeprefix("aten.").partition(".")[0] for each in flop_registry}
    assert {"mm", "convolution", "_flash_attention_forward"} <= names
    compiled = {
        "flex_attention",
        "flex_attention_backward",
    }  # made by torch.compile, which runs none
    assert {name for name in names - compiled if is_uncounted("aten", name, ())} == set()
