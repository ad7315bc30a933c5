"""A small convolutional network for 8×8 digits: seconds to train, convolutions and fully connected layers in it."""

from __future__ import annotations

from torch import nn

from laconic.workloads.models.registry import network


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
