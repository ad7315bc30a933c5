"""The 8-bit paper's MNIST experiment, also the network of SparCML's MNIST row."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from laconic.workloads.inputs import Pixels
from laconic.workloads.objective import CLASSIFICATION
from laconic.workloads.registry import register
from laconic.workloads.schedules import linear_decay
from laconic.workloads.workload import Workload

DECAY = 0.9  # of the running mean of squares, as in the lecture that introduced RMSProp


def rmsprop(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=rate, alpha=DECAY)


@register("mnist-mlp")
def mnist_mlp() -> Workload:
    """784-1024-1024-10 with dropout (0.2, 0.3, 0.3) on MNIST, RMSProp at 0.003.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §4.
    Differs: the paper gives neither batch size, epochs nor a schedule; here 512, 10 and a linear decay to zero.
    """
    return Workload(
        name="mnist-mlp",
        dataset="mnist",
        model="mlp",
        objective=CLASSIFICATION,
        optimizer=rmsprop,
        optimizer_name=f"RMSProp, decay {DECAY}, rate falling linearly to 0",
        learning_rate=0.003,
        batch=512,
        epochs=10,
        target=0.98,
        inputs=Pixels(),
        schedule=linear_decay,
    )
