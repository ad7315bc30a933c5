"""Networks that train in seconds or minutes: fully connected, LeNet, a character LSTM, and linear models."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.errors import BadInput, UnknownName
from laconic.workloads.data.split import SparseBatch
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


@network("digits-cnn", sample=(1, 8, 8))
def digits_cnn() -> nn.Module:
    """Two 3×3 convolutions (16, 32), a 2×2 max-pool after each, then 128 and 10 units: 22,602 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@network("lenet", sample=(1, 28, 28), published=431_080)
def lenet() -> nn.Module:
    """Two 5×5 convolutions (20, 50) with max-pooling, then 500 and 10 units: 431,080 parameters.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 86(11), 1998.
    Differs: the rectified variant that Caffe distributes and Deep Compression (Han et al., ICLR 2016, Table 3: 431 K)
    counts, not the 1998 network with its tanh units and partial connections.
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "conv1": lambda channels: nn.Conv2d(channels, channels, 1),
    "conv3": lambda channels: nn.Conv2d(channels, channels, 3, padding=1),
    "conv5": lambda channels: nn.Conv2d(channels, channels, 5, padding=2),
    "separable3": lambda channels: nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.Conv2d(channels, channels, 1)),
    "skip": lambda channels: nn.Identity(),
    "pool": lambda channels: nn.MaxPool2d(2),
}  # fmt: skip


@network("layered-cnn", sample=(1, 8, 8))
def layered_cnn(layers: str = "conv3-pool-conv3-pool", channels: int = 16) -> nn.Module:
    """A 3×3 convolution to so many channels, the named layers, a mean over 2×2 fields, 10 units; any size of image.

    A layer's weights are named by its place and kind, so that networks that agree in them can share their weights.

    Args:
        layers: conv1, conv3, conv5, separable3, skip and pool, with hyphens between them.
        channels: of every convolution.
    """
    parts: dict[str, nn.Module] = {"stem": nn.Conv2d(1, channels, 3, padding=1), "stem-relu": nn.ReLU()}
    for place, kind in enumerate(layers.split("-"), start=1):
        if kind not in LAYERS:
            raise UnknownName("layer", kind, LAYERS)
        parts[f"{place}-{kind}"] = LAYERS[kind](channels)
        if kind not in ("skip", "pool"):
            parts[f"{place}-relu"] = nn.ReLU()
    parts |= {"mean": nn.AdaptiveAvgPool2d(2), "flat": nn.Flatten(), "head": nn.Linear(4 * channels, 10)}
    return nn.Sequential(OrderedDict(parts))


class CharLSTM(nn.Module):
    """Embedding, LSTM, linear: logits (N, T, characters) for tokens (N, T). The state starts at zero in each window."""

    def __init__(self, characters: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return logits


@network("char-lstm", sample=(64,), vocabulary=65)
def char_lstm(characters: int = 65, embedding: int = 64, hidden: int = 256, layers: int = 1) -> nn.Module:
    """A character LSTM: 64-dimensional embedding, 256 units, 350,593 parameters.

    Source: Karpathy, The Unreasonable Effectiveness of Recurrent Neural Networks, 2015 (smaller here).
    """
    return CharLSTM(characters, embedding, hidden, layers)


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
