"""The layers that `python -m benchmarks operators` measures: shapes of published networks, with how often each occurs.

Sources: VGG-16 (Simonyan and Zisserman 2015), AlexNet in its one-column form (Krizhevsky 2014), ResNet-50 (He et al.
2016), GoogLeNet (Szegedy et al. 2015), DeepBench's server inference list.
"""

from __future__ import annotations

from laconic.errors import UnknownName
from laconic.operators import Convolution

Layer = tuple[str, int, Convolution]


def _square(channels: int, out: int, size: int, kernel: int, stride: int = 1, groups: int = 1) -> Convolution:
    """Square images, padded so that stride 1 keeps their size."""
    pad = kernel // 2
    return Convolution(1, channels, out, (size, size), (kernel, kernel), (stride, stride), (pad, pad), (1, 1), groups)


def _line(channels: int, length: int, kernel: int, groups: int = 1) -> Convolution:
    return Convolution(1, channels, channels, (length,), (kernel,), (1,), (kernel // 2,), (1,), groups)


_SETS: dict[str, list[Layer]] = {
    "vgg16": [
        ("conv1_1", 1, _square(3, 64, 224, 3)),
        ("conv1_2", 1, _square(64, 64, 224, 3)),
        ("conv2_1", 1, _square(64, 128, 112, 3)),
        ("conv2_2", 1, _square(128, 128, 112, 3)),
        ("conv3_1", 1, _square(128, 256, 56, 3)),
        ("conv3_2", 2, _square(256, 256, 56, 3)),
        ("conv4_1", 1, _square(256, 512, 28, 3)),
        ("conv4_2", 2, _square(512, 512, 28, 3)),
        ("conv5_1", 3, _square(512, 512, 14, 3)),
    ],
    "alexnet": [
        ("conv1", 1, Convolution(1, 3, 64, (224, 224), (11, 11), (4, 4), (2, 2), (1, 1))),
        ("conv2 5×5", 1, _square(64, 192, 27, 5)),
        ("conv3", 1, _square(192, 384, 13, 3)),
        ("conv4", 1, _square(384, 256, 13, 3)),
        ("conv5", 1, _square(256, 256, 13, 3)),
    ],
    "resnet50": [
        ("64→64 1×1", 1, _square(64, 64, 56, 1)),
        ("64→256 1×1", 4, _square(64, 256, 56, 1)),
        ("256→64 1×1", 2, _square(256, 64, 56, 1)),
        ("256→128 1×1", 1, _square(256, 128, 56, 1)),
        ("128→512 1×1", 4, _square(128, 512, 28, 1)),
        ("512→128 1×1", 3, _square(512, 128, 28, 1)),
        ("256→1024 1×1", 6, _square(256, 1024, 14, 1)),
        ("1024→256 1×1", 5, _square(1024, 256, 14, 1)),
        ("512→2048 1×1", 3, _square(512, 2048, 7, 1)),
        ("2048→512 1×1", 2, _square(2048, 512, 7, 1)),
        ("256→512 1×1 /2", 1, _square(256, 512, 56, 1, 2)),
        ("64 3×3", 3, _square(64, 64, 56, 3)),
        ("128 3×3", 3, _square(128, 128, 28, 3)),
        ("256 3×3", 5, _square(256, 256, 14, 3)),
        ("512 3×3", 2, _square(512, 512, 7, 3)),
    ],
    "googlenet": [
        ("3a 5×5", 1, _square(16, 32, 28, 5)),
        ("3b 5×5", 1, _square(32, 96, 28, 5)),
        ("4a 5×5", 1, _square(16, 48, 14, 5)),
        ("4e 5×5", 1, _square(32, 128, 14, 5)),
        ("5b 5×5", 1, _square(48, 128, 7, 5)),
        ("conv2 3×3", 1, _square(64, 192, 56, 3)),
        ("3b 3×3", 1, _square(128, 192, 28, 3)),
    ],
    "depthwise": [(f"k={k}", 1, _square(c, c, n, k, 1, c)) for k, c, n in
                  ((3, 128, 56), (7, 128, 28), (15, 128, 28), (21, 128, 28), (31, 128, 28), (31, 256, 14))],
    "conv1d": [(f"k={k}", 1, _line(8, 16_384, k)) for k in (256, 1024, 4096)],
    "deepbench": [
        ("112 3×3", 1, _square(64, 64, 112, 3)),
        ("54 3×3", 1, _square(64, 64, 54, 3)),
        ("28 5×5", 1, _square(192, 32, 28, 5)),
        ("14 3×3", 1, _square(512, 512, 14, 3)),
        ("7 3×3", 1, _square(832, 256, 7, 3)),
        ("14 5×5", 1, _square(512, 48, 14, 5)),
        ("7×7 /2", 1, _square(3, 64, 224, 7, 2)),
    ],
}  # fmt: skip


def names() -> list[str]:
    """The sets, sorted."""
    return sorted(_SETS)


def layers(name: str, batch: int = 1, only: str = "") -> list[Layer]:
    """The layers of a set for a number of samples; `only` those with a text in their names."""
    if name not in _SETS:
        raise UnknownName("set of layers", name, _SETS)
    found = [(layer, count, conv.with_batch(batch)) for layer, count, conv in _SETS[name] if only in layer]
    if not found:
        raise UnknownName(f"layer of {name}", only, [layer for layer, _, _ in _SETS[name]])
    return found
