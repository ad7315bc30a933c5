"""DenseNet-121: every layer of a block reads the maps of all layers before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.workloads.models.registry import network

GROWTH = 32
BOTTLENECK = 4  # the 1×1 convolution gives BOTTLENECK · GROWTH maps


class DenseLayer(nn.Module):
    """Adds GROWTH maps to its input: BN, relu, 1×1, BN, relu, 3×3."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * GROWTH)
        self.conv2 = nn.Conv2d(BOTTLENECK * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(functional.relu(self.norm2(y)))], dim=1)


@network("densenet121", sample=(3, 224, 224), published=7_978_856)
def densenet121(classes: int = 1000) -> nn.Module:
    """DenseNet-121 (blocks of 6, 12, 24 and 16 layers, growth 32): 7,978,856 parameters.

    Source: Huang, Liu, van der Maaten, Weinberger, Densely Connected Convolutional Networks, CVPR 2017, Table 1.
    """
    maps = 2 * GROWTH
    layers: list[nn.Module] = [nn.Conv2d(3, maps, 7, 2, padding=3, bias=False), nn.BatchNorm2d(maps), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    for block, count in enumerate((6, 12, 24, 16)):
        if block:  # transition: half the maps, half the image
            layers += [nn.BatchNorm2d(maps), nn.ReLU(), nn.Conv2d(maps, maps // 2, 1, bias=False), nn.AvgPool2d(2)]
            maps //= 2
        layers += [DenseLayer(maps + layer * GROWTH) for layer in range(count)]
        maps += count * GROWTH
    head = [nn.BatchNorm2d(maps), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(maps, classes)]
    return nn.Sequential(*layers, *head)
