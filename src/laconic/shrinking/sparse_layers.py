"""Layers that compute with the weights that are left, where that is quicker than computing with all of them.

Callers: `load_shrunk`. A product of a sparse matrix and a dense one is quick when the dense one is transposed: columns
of samples. So a chain of fully connected layers transposes once, keeps activations transposed from layer to layer, and
transposes back at its end. Whether a layer is quicker is measured on this machine, for the given number of samples. A
layer that is not in memory yet is read from the file some rows at a time, and never becomes dense.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from laconic.operators.timing import race
from laconic.shrinking.coder import chunks
from laconic.shrinking.file import Reader

_ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Identity, nn.Dropout)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
WORTH_IT = 1.1  # how much quicker a layer must be: less is noise
_DENSEST = 0.4  # above it a sparse product has never been quicker
_SAMPLE = 1 << 23  # weights of a layer that are measured, its first rows: beyond all caches

Rows = Callable[[int, int], Tensor]


def compressed(rows: Rows, shape: tuple[int, int]) -> Tensor:
    """A matrix in compressed rows, from a function that gives rows start … stop − 1 of it.

    Indices are 32 bits wide: products with a vector take half the time that those of 64 bits take.

    >>> dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    >>> compressed(lambda start, stop: dense[start:stop], (2, 2)).to_dense().tolist()
    [[0.0, 2.0], [3.0, 0.0]]
    """
    height, _ = chunks.tile_shape(*shape)  # so that no chunk of a file is decoded twice
    ends, columns, values, count = [torch.zeros(1, dtype=torch.int32)], [], [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its sparse layout a beta
        for top in range(0, shape[0], height):
            piece = rows(top, min(top + height, shape[0])).to_sparse_csr()
            ends.append((piece.crow_indices()[1:] + count).int())
            columns.append(piece.col_indices().int())
            values.append(piece.values())
            count += values[-1].numel()
        return torch.sparse_csr_tensor(_joined(ends), _joined(columns), _joined(values), size=shape)


def _joined(pieces: list[Tensor]) -> Tensor:
    """One tensor of many, which are given up: so no more than one of a matrix's three is in memory twice."""
    joined = torch.cat(pieces)
    pieces.clear()
    return joined


class SparseLinear(nn.Module):
    """y = W x + b for columns x, with W in compressed rows: only what is not zero is kept and multiplied."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseLinear:  # torch does not copy compressed rows by itself
        return SparseLinear(self.weight.clone(), deepcopy(self.bias, memo))

    def forward(self, columns: Tensor) -> Tensor:
        found = self.weight @ columns
        if self.bias is None:
            return found
        return found.add_(self.bias.detach() if columns.dim() == 1 else self.bias.detach()[:, None])


class SparseChain(nn.Module):
    """Fully connected layers and what is applied to each value between them, on columns; takes and gives rows.

    For inference: gradients do not flow through it.
    """

    def __init__(self, steps: Iterable[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        columns = rows[0] if len(rows) == 1 else rows.t().contiguous()  # a vector is quicker than one column
        for step in self.steps:
            columns = step(columns)
        return columns.t().reshape(*x.shape[:-1], columns.shape[0]).contiguous()


def make_sparse(
    model: nn.Module, names: set[str], *, batch: int = 1, measured: bool = True, reader: Reader | None = None
) -> list[str]:
    """Replace fully connected layers whose weights are among `names` where that is quicker; returns their names.

    Neighbours in a `Sequential`, with activations between them, become one chain.

    Args:
        batch: samples at a time, for the measurement.
        measured: False replaces them all.
        reader: of the file with weights that are still on the device "meta".
    """
    changed: list[str] = []
    for path, parent in list(model.named_modules()):
        if reaches_inside(parent):
            continue
        for child, layer in list(parent.named_children()):
            name = f"{path}.{child}" if path else child
            if _can_be_sparse(layer, f"{name}.weight", names):
                sparse = _chosen(layer, f"{name}.weight", batch, measured, reader)
                if sparse is not None:
                    setattr(parent, child, sparse)
                    changed.append(name)
        if isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward:
            _join(parent)  # another `forward` may need what is between
    return changed


def on_meta(model: nn.Module, names: set[str]) -> set[str]:
    """Of these weights those of fully connected layers that are on the device "meta": `make_sparse` reads them."""
    parents = [(path, parent) for path, parent in model.named_modules() if not reaches_inside(parent)]
    return {name for path, parent in parents for child, layer in parent.named_children()
            if _can_be_sparse(layer, name := f"{path}.{child}.weight".lstrip("."), names)
            and model.get_parameter(name).is_meta}  # fmt: skip


def _can_be_sparse(layer: nn.Module, name: str, names: set[str]) -> TypeGuard[nn.Linear]:
    """Whether a weight is among `names`, and one that sparse products take: of a plain layer, on the CPU, float32."""
    if type(layer) is not nn.Linear or name not in names or not layer.weight.numel():
        return False
    return layer.weight.dtype == torch.float32 and layer.weight.device.type in ("cpu", "meta")


def reaches_inside(parent: nn.Module) -> bool:
    """Whether a module is one of torch's own, such as attention, which take the weights of their layers themselves."""
    return not isinstance(parent, _CONTAINERS) and type(parent).__module__.startswith("torch.nn.")


class _TooDense(Exception):
    """Too many weights are left for a sparse product."""


def _chosen(layer: nn.Linear, name: str, batch: int, measured: bool, reader: Reader | None) -> SparseChain | None:
    """The layer with few weights, or None where it is not quicker; the layer then has its weight."""
    late = reader if layer.weight.is_meta else None
    shape = (layer.out_features, layer.in_features)

    def rows(start: int, stop: int) -> Tensor:
        found = late.rows(name, start, stop) if late else layer.weight.detach()[start:stop]
        if start == 0 and int(found.count_nonzero()) > _DENSEST * found.numel():  # before any of it is compressed
            raise _TooDense
        return found

    with contextlib.suppress(_TooDense):
        if not measured or _is_quicker(rows(0, min(shape[0], -(-_SAMPLE // shape[1]))), batch):
            return SparseChain([SparseLinear(compressed(rows, shape), layer.bias)])
    if late:
        layer.load_state_dict({"weight": late.tensor(name)}, strict=False, assign=True)
    return None


def _join(parent: nn.Sequential) -> None:
    """Merge neighbouring chains, with the activations between them; the freed places stay, empty."""
    for run in _runs(parent):
        first, *rest = run
        steps = [step for each in run for step in _steps(parent[each])]
        parent[first] = SparseChain(steps)
        for each in rest:
            parent[each] = nn.Identity()


def _steps(module: nn.Module) -> list[nn.Module]:
    return list(module.steps) if isinstance(module, SparseChain) else [module]


def _runs(parent: nn.Sequential) -> Iterator[list[int]]:
    """Numbers of neighbours that can be one chain: each begins and ends with a sparse layer."""
    current: list[int] = []
    for place, child in enumerate([*parent, None]):
        if isinstance(child, SparseChain) or (current and isinstance(child, _ELEMENTWISE)):
            current.append(place)
            continue
        while current and not isinstance(parent[current[-1]], SparseChain):
            current.pop()
        if len(current) > 1:
            yield current
        current = []


@torch.no_grad()
def _is_quicker(weight: Tensor, batch: int) -> bool:
    """Whether a product with these rows is quicker sparse, transposing included."""
    sparse = SparseChain([SparseLinear(compressed(lambda a, b: weight[a:b], tuple(weight.shape)), None)])  # type: ignore[arg-type]
    x = torch.randn(batch, weight.shape[1], generator=torch.Generator().manual_seed(0))
    timed = race({"dense": lambda: nn.functional.linear(x, weight), "sparse": lambda: sparse(x)}, turns=7, budget_s=0.5)
    return "sparse" in timed and timed["sparse"].speedup >= WORTH_IT
