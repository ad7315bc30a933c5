"""Residual networks for CIFAR-10, of depth 6n + 2: three stages of n blocks with 16, 32 and 64 filters.

Shortcuts have no parameters: where a stage halves the image and doubles the filters, the input is taken at every
second pixel and padded with zero channels (the paper's option A), so that depth 110 has 1,727,962 parameters, "1.7 M".
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from laconic.errors import BadInput
from laconic.workloads.models.registry import network


class Block(nn.Module):
    """y = relu(x + BN(conv(relu(BN(conv(x)))))), both convolutions 3×3."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.added = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride > 1 or self.added:
            half = self.added // 2
            shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.added - half))
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(shortcut + self.norm2(self.conv2(y)))


class CifarResNet(nn.Module):
    """The network; `blocks` is the paper's n."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        layers: list[nn.Module] = []
        filters = 16
        for stage, outputs in enumerate((16, 32, 64)):
            for block in range(blocks):
                layers.append(Block(filters, outputs, 2 if stage and not block else 1))
                filters = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(functional.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


@network("cifar-resnet", sample=(3, 32, 32), published=1_727_962)
def cifar_resnet(depth: int = 110, classes: int = 10) -> nn.Module:
    """ResNet of depth 6n + 2 for 32×32 images: 20 has 0.27 M parameters, 56 0.85 M, 110 1.7 M.

    Source: He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016, §4.2 and Table 6.
    """
    if not isinstance(depth, int) or depth < 8 or depth % 6 != 2:
        raise BadInput(f"a CIFAR ResNet has depth 6n + 2 (8, 14, 20, … 56, 110), got {depth}")
    return CifarResNet(depth // 6, classes)
