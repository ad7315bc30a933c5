"""What is trained: a model, data, an optimiser, a declared target and a stopping rule, one file each.

Callers: the trainer, `laconic train` and `laconic compare`. `get("digits-mlp")` gives a frozen `Workload`;
`workload.prepare(seed)` builds its model and reads its data. To add a workload, add one file with one `@register`
function to this folder and its name below.
"""

from __future__ import annotations

from laconic.workloads import (  # noqa: F401  (registers the workloads)
    cifar_convnet,
    cifar_resnet,
    digits_cnn,
    digits_mlp,
    fashion_lenet,
    linear,
    mnist_lenet,
    mnist_mlp,
    rcv1_logistic,
    shakespeare_lstm,
)
from laconic.workloads.changes import AS_DECLARED, Changes
from laconic.workloads.registry import get, names, register, summary
from laconic.workloads.task import Batch, Task
from laconic.workloads.workload import Workload, prepare

__all__ = ["AS_DECLARED", "Batch", "Changes", "Task", "Workload", "get", "names", "prepare", "register", "summary"]
