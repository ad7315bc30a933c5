"""Residual networks on CIFAR-10; depth 110 is the one of the top-k slides."""

from __future__ import annotations

from laconic.errors import BadInput
from laconic.workloads.inputs import CIFAR_PIXELS, ShiftedPixels
from laconic.workloads.objective import CLASSIFICATION
from laconic.workloads.optimizers import decayed_momentum
from laconic.workloads.plans import steps_down, warmed_up
from laconic.workloads.registry import register
from laconic.workloads.workload import Workload

WEIGHT_DECAY = 1e-4
EPOCHS = 164  # 64 k steps of 128 images


@register("cifar-resnet")
def cifar_resnet(depth: int = 20) -> Workload:
    """ResNet of depth 6n + 2 on CIFAR-10, by default 20; `cifar-resnet(110)` is ResNet-110.

    Source: He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016, §4.2: rate 0.1, divided by 10
    at 32 k and 48 k of 64 k steps, weight decay 1e-4, shifts by up to 4 pixels and mirroring. Table 6 gives accuracies
    of 91.25 % (20), 93.03 % (56) and 93.39 % (110); the targets here are a point lower.
    Differs: depth 110 starts with a rate that grows over the first epoch, where the paper starts at 0.01 for 400 steps.
    """
    if not isinstance(depth, int) or depth < 8 or depth % 6 != 2:
        raise BadInput(f"a CIFAR ResNet has depth 6n + 2 (8, 14, 20, … 56, 110), got {depth!r}")
    falls = steps_down(0.5, 0.75)
    return Workload(
        name="cifar-resnet",
        dataset="cifar10",
        model=f"cifar-resnet({depth})",
        objective=CLASSIFICATION,
        optimizer=decayed_momentum(WEIGHT_DECAY),
        optimizer_name=f"SGD, momentum 0.9, weight decay {WEIGHT_DECAY}, rate ÷ 10 at 50 % and 75 %",
        learning_rate=0.1,
        batch=128,
        epochs=EPOCHS,
        target=0.9 if depth < 56 else 0.92,
        inputs=ShiftedPixels(CIFAR_PIXELS, size=32, padding=4),
        plan=warmed_up(1 / EPOCHS, falls) if depth >= 110 else falls,
    )
