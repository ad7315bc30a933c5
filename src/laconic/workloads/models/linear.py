"""Linear models: regression on dense features, logistic regression on sparse ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.workloads.data.split import SparseBatch
from laconic.workloads.models.registry import network


class LinearRegression(nn.Module):
    """ŷ = ⟨x, w⟩ + b for rows x."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        nn.init.zeros_(self.linear.weight)  # convex: the start decides nothing, zero makes runs comparable
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.squeeze(-1)


class SparseLogistic(nn.Module):
    """The logit ⟨x, w⟩ + b of each sparse row x. The gradient of w is dense; only the rows' columns are read."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, rows: SparseBatch) -> Tensor:
        sums = functional.embedding_bag(
            rows.columns, self.weight, rows.offsets, mode="sum", per_sample_weights=rows.values
        )
        return sums.squeeze(-1) + self.bias


@network("linear", sample=(1000,))
def linear(features: int = 1000) -> nn.Module:
    """Linear regression: features + 1 parameters, started at zero."""
    return LinearRegression(features)


@network("logistic")
def logistic(features: int = 47_236) -> nn.Module:
    """Logistic regression on sparse rows: features + 1 parameters, started at zero."""
    return SparseLogistic(features)
