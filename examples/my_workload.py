"""A workload of your own: your network, your tensors, your optimiser.

    laconic compare my_workload:mine -n 2 --configs ddp,compress:dynamic8 --seeds 2      # from the folder of this file
"""

import torch
from torch import nn

from laconic.workloads import CLASSIFICATION, Workload, data, models


@models.network("my-network")
def my_network(width: int = 64) -> nn.Module:
    """Any nn.Module; its arguments can be written in `model=` below."""
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 3))


@data.dataset("my-data")
def my_data() -> data.Dataset:
    """Any tensors, x and y of the same length; every worker reads them and takes its share of each batch."""
    x = torch.randn(3000, 20, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return data.Dataset("my-data", "The largest of three", "made here",
                        train=data.Split(x[:2500], y[:2500]), test=data.Split(x[2500:], y[2500:]))  # fmt: skip


def mine(width: int = 64) -> Workload:
    """What `laconic train my_workload:mine` trains; `my_workload:mine(128)` gives it another width."""
    return Workload(
        name="mine",
        dataset="my-data",
        model=f"my-network({width})",
        objective=CLASSIFICATION,  # or laconic.workloads.Objective(name, losses of each sample, hits of each sample)
        optimizer=torch.optim.AdamW,
        optimizer_name="AdamW",  # as the record names it
        learning_rate=0.003,
        batch=100,  # samples of a step, over all workers
        epochs=5,
        target=0.9,  # test accuracy that counts as trained
    )
