"""Residual networks for ImageNet: ResNet-18 of basic blocks, ResNet-50 of bottlenecks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from laconic.workloads.models.registry import network


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias and its normalisation."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
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
            layers.append(Residual(inputs, width, width * expansion, 2 if stage and not block else 1))
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
