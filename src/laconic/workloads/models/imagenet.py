"""Networks for ImageNet, as published: AlexNet, VGG, GoogLeNet, ResNet and DenseNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.workloads.models.registry import network


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, eps: float = 1e-5) -> list[nn.Module]:
    """A convolution without bias and its normalisation."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs, eps=eps)]


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
    return nn.Sequential(*_conv(inputs, outputs, kernel, stride, eps=0.001), nn.ReLU())


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


class ImagenetBlock(nn.Module):
    """y = relu(shortcut(x) + body(x)); the shortcut is a 1×1 convolution where shapes differ (option B)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        if outputs == width:  # basic: two 3×3
            body = [*_conv(inputs, width, 3, stride), nn.ReLU(), *_conv(width, outputs, 3)]
        else:  # bottleneck: 1×1, 3×3, 1×1; the stride is in the 3×3, as reference implementations have it
            body = [*_conv(inputs, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU()]
            body += _conv(width, outputs, 1)
        self.body = nn.Sequential(*body)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.shortcut(x) + self.body(x))


def _resnet(blocks: tuple[int, ...], expansion: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            layers.append(ImagenetBlock(inputs, width, width * expansion, 2 if stage and not block else 1))
            inputs = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


@network("resnet18", sample=(3, 224, 224), published=11_689_512)
def resnet18(classes: int = 1000) -> nn.Module:
    """ResNet-18: 11,689,512 parameters.

    Source: He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016, Table 1.
    """
    return _resnet((2, 2, 2, 2), 1, classes)


@network("resnet50", sample=(3, 224, 224), published=25_557_032)
def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50: 25,557,032 parameters.

    Source: He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016, Table 1.
    """
    return _resnet((3, 4, 6, 3), 4, classes)


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
    layers: list[nn.Module] = [*_conv(3, maps, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    for block, count in enumerate((6, 12, 24, 16)):
        if block:  # transition: half the maps, half the image
            layers += [nn.BatchNorm2d(maps), nn.ReLU(), nn.Conv2d(maps, maps // 2, 1, bias=False), nn.AvgPool2d(2)]
            maps //= 2
        layers += [DenseLayer(maps + layer * GROWTH) for layer in range(count)]
        maps += count * GROWTH
    head = [nn.BatchNorm2d(maps), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(maps, classes)]
    return nn.Sequential(*layers, *head)
