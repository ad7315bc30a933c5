"""AlexNet, the one-column variant that reference implementations distribute."""

from __future__ import annotations

from torch import nn

from laconic.workloads.models.registry import network


@network("alexnet", sample=(3, 224, 224), published=61_100_840)
def alexnet(classes: int = 1000) -> nn.Module:
    """AlexNet in one column: 61,100,840 parameters, 96 % of them in the fully connected layers.

    Source: Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014 (the network of
    Krizhevsky, Sutskever, Hinton, NIPS 2012, without its two groups and response normalisation).
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )
