"""The workloads without parameters, one row each. To add one, add a row.

Callers: the registry, by importing this file.
"""

from __future__ import annotations

from laconic.workloads.inputs import CIFAR_PIXELS, Pixels, ShiftedPixels, Tokens
from laconic.workloads.objective import CLASSIFICATION, LOGISTIC, NEXT_CHARACTER
from laconic.workloads.optimizers import adam, decayed_momentum, momentum, plain, rmsprop
from laconic.workloads.plans import linear_decay, steps_down
from laconic.workloads.registry import declare
from laconic.workloads.workload import Workload

_DECAYED_SGD = "SGD, momentum 0.9, rate falling linearly to 0"

declare(
    "A 64-256-256-10 network on 8×8 digits: seconds, no download.",
    Workload(
        name="digits-mlp", dataset="digits", model="mlp((64, 256, 256, 10), dropout=())", objective=CLASSIFICATION,
        optimizer=momentum, optimizer_name=_DECAYED_SGD, learning_rate=0.2, plan=linear_decay,
        batch=64, epochs=20, target=0.97, inputs=Pixels(largest=16.0),
    ),
)  # fmt: skip

declare(
    "Two convolutions and two fully connected layers on 8×8 digits: seconds, no download.",
    Workload(
        name="digits-cnn", dataset="digits", model="digits-cnn", objective=CLASSIFICATION,
        optimizer=momentum, optimizer_name=_DECAYED_SGD, learning_rate=0.1, plan=linear_decay,
        batch=64, epochs=20, target=0.98, inputs=Pixels(largest=16.0),
    ),
)  # fmt: skip

# Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §4; also SparCML's MNIST row.
# Differs: the paper gives neither batch size, epochs nor a plan of the rate; here 512, 10 and a linear decay to zero.
declare(
    "784-1024-1024-10 with dropout (0.2, 0.3, 0.3) on MNIST, RMSProp at 0.003.",
    Workload(
        name="mnist-mlp", dataset="mnist", model="mlp", objective=CLASSIFICATION,
        optimizer=rmsprop, optimizer_name="RMSProp, decay 0.9, rate falling linearly to 0", learning_rate=0.003,
        plan=linear_decay, batch=512, epochs=10, target=0.98, inputs=Pixels(),
    ),
)  # fmt: skip

declare(
    "LeNet (431,080 parameters) on MNIST.",
    Workload(
        name="mnist-lenet", dataset="mnist", model="lenet", objective=CLASSIFICATION,
        optimizer=momentum, optimizer_name=_DECAYED_SGD, learning_rate=0.05, plan=linear_decay,
        batch=128, epochs=5, target=0.99, inputs=Pixels(),
    ),
)  # fmt: skip

declare(
    "LeNet (431,080 parameters) on Fashion-MNIST.",
    Workload(
        name="fashion-lenet", dataset="fashion", model="lenet", objective=CLASSIFICATION,
        optimizer=momentum, optimizer_name=_DECAYED_SGD, learning_rate=0.05, plan=linear_decay,
        batch=128, epochs=8, target=0.9, inputs=Pixels(),
    ),
)  # fmt: skip

# Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §4; Krizhevsky's cuda-convnet.
# Differs: one weight decay for all layers and 60 epochs, where cuda-convnet trains for some 500 in three rates.
declare(
    "cuda-convnet (2.05 M parameters, 90 % in its locally connected layers) on 24×24 crops of CIFAR-10.",
    Workload(
        name="cifar-convnet", dataset="cifar10", model="cuda-convnet", objective=CLASSIFICATION,
        optimizer=decayed_momentum(5e-4), learning_rate=0.02, plan=steps_down(0.7, 0.9),
        optimizer_name="SGD, momentum 0.9, weight decay 0.0005, rate ÷ 10 at 70 % and 90 %",
        batch=128, epochs=60, target=0.8, inputs=ShiftedPixels(CIFAR_PIXELS, size=24, padding=0),
    ),
)  # fmt: skip

# Source: Renggli et al., SparCML, 2018 (RCV1 convergence). Sparse features, convex: the top-k slides' first figure.
declare(
    "Logistic regression on RCV1's 47,236 term weights; the gradient is dense to the exchange, mostly zero in value.",
    Workload(
        name="rcv1-logistic", dataset="rcv1", model="logistic", objective=LOGISTIC,
        optimizer=plain, optimizer_name="SGD, rate falling linearly to 0", learning_rate=10.0, plan=linear_decay,
        batch=64, epochs=20, target=0.86,
    ),
)  # fmt: skip

declare(
    "One LSTM layer of 256 units on windows of 64 characters, judged in bits per character.",
    Workload(
        name="shakespeare-lstm", dataset="shakespeare", data_options=(("length", 64),), model="char-lstm",
        objective=NEXT_CHARACTER, optimizer=adam, optimizer_name="Adam, rate falling linearly to 0",
        learning_rate=0.004, plan=linear_decay, batch=64, epochs=8, target=2.4, inputs=Tokens(),
    ),
)  # fmt: skip
