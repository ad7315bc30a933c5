"""Layers that compute with the weights that are left, where that is quicker than computing with all of them.

Callers: `load_shrunk`. A product of a sparse matrix and a dense one is quick when the dense one is transposed: columns
of samples. So a chain of fully connected layers transposes once, keeps activations transposed from layer to layer, and
transposes back at its end. Whether a chain is quicker is measured on this machine, for the given number of samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laconic.operators.timing import race

_ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Identity, nn.Dropout)
WORTH_IT = 1.1  # how much quicker a chain must be: less is noise
_DENSEST = 0.4  # above it a sparse product has never been quicker


class SparseLinear(nn.Module):
    """y = W x + b for columns x, with W in compressed rows: only what is not zero is kept and multiplied."""

    weight: Tensor

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls its sparse layout a beta
            self.register_buffer("weight", dense.weight.detach().to_sparse_csr())
        self.bias = dense.bias
        self.in_features, self.out_features = dense.in_features, dense.out_features

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
        self.steps = nn.ModuleList(SparseLinear(step) if isinstance(step, nn.Linear) else step for step in steps)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        columns = rows[0] if len(rows) == 1 else rows.t().contiguous()  # a vector is quicker than one column
        for step in self.steps:
            columns = step(columns)
        return columns.t().reshape(*x.shape[:-1], -1).contiguous()


def make_sparse(model: nn.Module, names: set[str], *, batch: int = 1, measured: bool = True) -> list[str]:
    """Replace fully connected layers whose weights are among `names` where that is quicker; returns their names.

    Neighbours in a `Sequential`, with activations between them, become one chain.

    Args:
        batch: samples at a time, for the measurement.
        measured: False replaces them all.
    """
    changed: list[str] = []
    for path, parent in list(model.named_modules()):
        if isinstance(parent, SparseChain):
            continue
        prefix = f"{path}." if path else ""
        children = dict(parent.named_children())
        for run in _runs(parent, children, {name.removeprefix(prefix) for name in names if name.startswith(prefix)}):
            steps = [children[name] for name in run]
            chain = SparseChain(steps)
            if measured and not _is_quicker(chain, steps, batch):
                continue
            setattr(parent, run[0], chain)
            for name in run[1:]:
                setattr(parent, name, nn.Identity())
            changed += [prefix + name for name in run if isinstance(children[name], nn.Linear)]
    return changed


def _runs(parent: nn.Module, children: dict[str, nn.Module], names: set[str]) -> list[list[str]]:
    """Neighbouring children that can be one chain: each begins and ends with a sparse layer."""
    runs: list[list[str]] = []
    current: list[str] = []
    for name, child in children.items():
        is_sparse = isinstance(child, nn.Linear) and f"{name}.weight" in names and _density(child) <= _DENSEST
        if is_sparse and (not current or isinstance(parent, nn.Sequential)):
            current.append(name)
        elif is_sparse:
            runs.append(current)
            current = [name]
        elif current and isinstance(parent, nn.Sequential) and isinstance(child, _ELEMENTWISE):
            current.append(name)
        else:
            runs.append(current)
            current = []
    found = []
    for run in [*runs, current]:
        while run and not isinstance(children[run[-1]], nn.Linear):
            run = run[:-1]
        if run:
            found.append(run)
    return found


def _density(layer: nn.Linear) -> float:
    return float(layer.weight.detach().count_nonzero()) / max(1, layer.weight.numel())


@torch.no_grad()
def _is_quicker(chain: SparseChain, steps: list[nn.Module], batch: int) -> bool:
    dense = nn.Sequential(*steps)
    first = steps[0]
    assert isinstance(first, nn.Linear)
    x = torch.randn(batch, first.in_features, generator=torch.Generator().manual_seed(0))
    timed = race({"dense": lambda: dense(x), "sparse": lambda: chain(x)}, turns=7, budget_s=0.5)
    return "sparse" in timed and timed["sparse"].speedup >= WORTH_IT
