"""Fully connected networks with rectified linear units and dropout before each layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.workloads.models.registry import network


class MLP(nn.Module):
    """Layers of the given sizes; dropout[i] of the inputs of layer i are zeroed in training."""

    def __init__(self, sizes: Sequence[int], dropout: Sequence[float]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for position, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            if dropout and dropout[position]:
                layers.append(nn.Dropout(dropout[position]))
            layers.append(nn.Linear(inputs, outputs))
            if position < len(sizes) - 2:
                layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@network("mlp", sample=(784,))
def mlp(sizes: Sequence[int] = (784, 1024, 1024, 10), dropout: Sequence[float] = (0.2, 0.3, 0.3)) -> nn.Module:
    """The 8-bit paper's MNIST network, 784-1024-1024-10: 1,863,690 parameters.

    Args:
        sizes: inputs, hidden layers, outputs.
        dropout: one rate per layer, or none at all.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §4.
    """
    if len(sizes) < 2 or min(sizes) < 1:
        raise BadInput(f"an mlp needs at least two sizes, all positive, got {list(sizes)}")
    if dropout and (len(dropout) != len(sizes) - 1 or not all(0 <= rate < 1 for rate in dropout)):
        raise BadInput(f"an mlp of {len(sizes) - 1} layers takes as many dropout rates in [0, 1), got {list(dropout)}")
    return MLP(sizes, dropout)
