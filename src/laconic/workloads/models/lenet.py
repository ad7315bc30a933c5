"""LeNet for 28×28 grey images, in the form most compression papers train."""

from __future__ import annotations

from torch import nn

from laconic.workloads.models.registry import network


@network("lenet", sample=(1, 28, 28), published=431_080)
def lenet() -> nn.Module:
    """Two 5×5 convolutions (20, 50) with max-pooling, then 500 and 10 units: 431,080 parameters.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 86(11), 1998.
    Differs: the rectified variant that Caffe distributes and Deep Compression (Han et al., ICLR 2016, Table 3: 431 K)
    counts, not the 1998 network with its tanh units and partial connections.
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )
