"""GoogLeNet: nine inception modules, with batch normalisation and without auxiliary classifiers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.workloads.models.registry import network

# Filters of each module: 1×1; reduction and 3×3; reduction and second 3×3; after the pool. None: a 3×3 max-pool.
MODULES: tuple[tuple[int, int, int, int, int, int] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, eps=0.001), nn.ReLU())


class Inception(nn.Module):
    """Four branches side by side, their maps concatenated."""

    def __init__(self, inputs: int, one: int, reduce: int, three: int, reduce5: int, five: int, pool: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _unit(inputs, one, 1),
                nn.Sequential(_unit(inputs, reduce, 1), _unit(reduce, three, 3)),
                nn.Sequential(_unit(inputs, reduce5, 1), _unit(reduce5, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1, ceil_mode=True), _unit(inputs, pool, 1)),
            ]
        )
        self.outputs = one + three + five + pool

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


@network("googlenet", sample=(3, 224, 224), published=6_624_904)
def googlenet(classes: int = 1000) -> nn.Module:
    """GoogLeNet as torchvision counts it, without auxiliary heads: 6,624,904 parameters.

    Source: Szegedy et al., Going Deeper with Convolutions, CVPR 2015, Table 1.
    Differs: batch normalisation instead of biases, and a 3×3 where the paper has a 5×5 convolution, as in the published
    weights of torchvision; the paper's own network has about 6.8 M.
    """
    layers: list[nn.Module] = [_unit(3, 64, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [_unit(64, 64, 1), _unit(64, 192, 3), nn.MaxPool2d(3, 2, ceil_mode=True)]
    inputs = 192
    for number, module in enumerate(MODULES):
        if module is None:
            layers.append(nn.MaxPool2d(3 if number == 2 else 2, 2, ceil_mode=True))
            continue
        inception = Inception(inputs, *module)
        layers.append(inception)
        inputs = inception.outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers, *head)
