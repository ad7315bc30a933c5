"""VGG-16 and VGG-19: 3×3 convolutions in five stages, then three fully connected layers."""

from __future__ import annotations

from torch import nn

from laconic.workloads.models.registry import network

FILTERS = (64, 128, 256, 512, 512)


def _vgg(repeats: tuple[int, ...], classes: int) -> nn.Module:
    """`repeats[s]` convolutions in stage s, a 2×2 max-pool after each stage."""
    layers: list[nn.Module] = []
    inputs = 3
    for filters, count in zip(FILTERS, repeats, strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, filters, 3, padding=1), nn.ReLU()]
            inputs = filters
        layers.append(nn.MaxPool2d(2))
    head = [
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4096, classes),
    ]
    return nn.Sequential(*layers, *head)


@network("vgg16", sample=(3, 224, 224), published=138_357_544)
def vgg16(classes: int = 1000) -> nn.Module:
    """VGG-16 (configuration D): 138,357,544 parameters.

    Source: Simonyan, Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015, Table 1.
    """
    return _vgg((2, 2, 3, 3, 3), classes)


@network("vgg19", sample=(3, 224, 224), published=143_667_240)
def vgg19(classes: int = 1000) -> nn.Module:
    """VGG-19 (configuration E): 143,667,240 parameters.

    Source: Simonyan, Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015, Table 1.
    """
    return _vgg((2, 2, 4, 4, 4), classes)
