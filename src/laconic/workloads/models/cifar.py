"""Networks for CIFAR-10: residual ones of depth 6n + 2, cuda-convnet with locally connected layers, and a small one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.errors import BadInput
from laconic.workloads.models.registry import network


class CifarBlock(nn.Module):
    """y = relu(x + BN(conv(relu(BN(conv(x)))))), both convolutions 3×3.

    The shortcut has no parameters: where the image is halved and the filters doubled, the input is taken at every
    second pixel and padded with zero channels (the paper's option A).
    """

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
    """Three stages of `blocks`, the paper's n, with 16, 32 and 64 filters."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        layers: list[nn.Module] = []
        filters = 16
        for stage, outputs in enumerate((16, 32, 64)):
            for block in range(blocks):
                layers.append(CifarBlock(filters, outputs, 2 if stage and not block else 1))
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


class LocallyConnected2d(nn.Module):
    """y[n, o, p] = b[p, o] + Σ_{k,c} w[p, (k, c), o] · x[n, c, p + k]: a filter of its own at every pixel p.

    Computed as one batch of matrix products, a matrix per pixel: N·P·O·C·K² multiplications as in a convolution, and P
    times its weights.

    Args:
        inputs: channels in.
        outputs: channels out.
        size: height and width of the image, which stay the same.
        kernel: odd height and width of a filter; the border is padded with zeros.
    """

    def __init__(self, inputs: int, outputs: int, size: int, kernel: int) -> None:
        super().__init__()
        self.kernel, self.size, self.outputs = kernel, size, outputs
        self.weight = nn.Parameter(torch.empty(size * size, inputs * kernel * kernel, outputs))
        self.bias = nn.Parameter(torch.zeros(size * size, outputs))
        nn.init.normal_(self.weight, std=math.sqrt(2 / (inputs * kernel * kernel)))

    def forward(self, x: Tensor) -> Tensor:
        # Pixels first: patches are then copied in runs of C values and each pixel's matrix is contiguous.
        pad = self.kernel // 2
        pixels = functional.pad(x.permute(2, 3, 0, 1), (0, 0, 0, 0, pad, pad, pad, pad))
        shifts = [(i, j) for i in range(self.kernel) for j in range(self.kernel)]
        patches = torch.cat([pixels[i : i + self.size, j : j + self.size] for i, j in shifts], dim=3)
        sums = torch.baddbmm(self.bias.unsqueeze(1), patches.flatten(0, 1), self.weight)  # pixels, N, outputs
        return sums.permute(1, 2, 0).reshape(-1, self.outputs, self.size, self.size)


class ResponseNorm(nn.Module):
    """Normalisation across maps: y_i = x_i / (1 + α/n · Σ_{|j − i| ≤ n/2} x_j²)^¾.

    Equal to torch's LocalResponseNorm with k = 1 and β = ¾; the sum over maps is a 1×1 convolution with a band of ones
    and the power two square roots, because torch pools a fifth dimension and calls `pow`, slower on a CPU.
    """

    band: Tensor

    def __init__(self, channels: int, size: int = 9, alpha: float = 0.001) -> None:
        super().__init__()
        self.scale = alpha / size
        place = torch.arange(channels)
        band = ((place[:, None] - place[None, :]).abs() <= size // 2).float()
        self.register_buffer("band", band[:, :, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        root = torch.rsqrt(1 + self.scale * functional.conv2d(x * x, self.band))
        return x * root * torch.sqrt(root)


class ChannelsLast(nn.Sequential):
    """Layers that see images with the channels of a pixel side by side, which a CPU pools faster."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in self:
            x = layer(x)
        return x


@network("cuda-convnet", sample=(3, 24, 24))
def cuda_convnet(size: int = 24, classes: int = 10) -> nn.Module:
    """Convolutions 64×5×5 and 64×3×3, then locally connected 64×3×3 and 32×3×3, on 24×24 crops: 2,047,434 parameters.

    Each convolution is followed by 3×3 max-pooling with stride 2, then rectified (which commutes with the maximum, of
    a quarter as many values), then normalised across 9 maps.

    Args:
        size: height and width of the input.
        classes: outputs.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §4; Krizhevsky's cuda-convnet,
    `layers-conv-local-11pct`, for what the paper leaves open (the locally connected layers, the normalisation).
    Differs: weights start by He's rule; cuda-convnet's fixed standard deviations (1e-4 in the first layer) need many
    epochs to leave the plateau they start on.
    """
    pooled = math.ceil((math.ceil((size - 3) / 2) + 1 - 3) / 2) + 1
    model = ChannelsLast(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
        ResponseNorm(64),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
        ResponseNorm(64),
        LocallyConnected2d(64, 64, pooled, 3),
        nn.ReLU(),
        LocallyConnected2d(64, 32, pooled, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * pooled * pooled, classes),
    )
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


@network("cifar-cnn", sample=(3, 24, 24))
def cifar_cnn() -> nn.Module:
    """Two 5×5 convolutions (32, 64) with max-pooling, then 512 and 10 units, on 24×24 crops: 354,250 parameters."""
    return ChannelsLast(
        nn.Conv2d(3, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
