"""The 8-bit paper's CIFAR-10 experiment: cuda-convnet with two locally connected layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from laconic.workloads.inputs import Pixels, ShiftedPixels
from laconic.workloads.objective import CLASSIFICATION
from laconic.workloads.registry import register
from laconic.workloads.schedules import steps_down
from laconic.workloads.workload import Workload

CIFAR_PIXELS = Pixels(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))  # of the training images
WEIGHT_DECAY = 5e-4


def decayed_momentum(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=WEIGHT_DECAY)


@register("cifar-convnet")
def cifar_convnet() -> Workload:
    """cuda-convnet (2.05 M parameters, 90 % in its locally connected layers) on 24×24 crops of CIFAR-10.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §4; Krizhevsky's cuda-convnet.
    Differs: one weight decay for all layers and 60 epochs, where cuda-convnet trains for some 500 in three rates.
    """
    return Workload(
        name="cifar-convnet",
        dataset="cifar10",
        model="cuda-convnet",
        objective=CLASSIFICATION,
        optimizer=decayed_momentum,
        optimizer_name=f"SGD, momentum 0.9, weight decay {WEIGHT_DECAY}, rate ÷ 10 at 70 % and 90 %",
        learning_rate=0.02,
        batch=128,
        epochs=60,
        target=0.8,
        inputs=ShiftedPixels(CIFAR_PIXELS, size=24, padding=0),
        schedule=steps_down(0.7, 0.9),
    )
