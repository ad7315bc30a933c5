"""The workloads, one row each. To add one, add a row, or a file like this one.

Callers: the registry, by importing this file.
"""

from __future__ import annotations

from functools import partial

from laconic.errors import BadInput
from laconic.workloads.inputs import CIFAR_PIXELS, Pixels, ShiftedPixels, Tokens
from laconic.workloads.objective import CLASSIFICATION, LOGISTIC, NEXT_CHARACTER, REGRESSION
from laconic.workloads.optimizers import adam, adamw, linear_decay, momentum, plain, rmsprop, steps_down, warmed_up
from laconic.workloads.registry import declare, register
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
    "LeNet-300-100 (266,610 parameters) on MNIST.",
    Workload(
        name="mnist-300-100", dataset="mnist", model="mlp((784, 300, 100, 10), dropout=())", objective=CLASSIFICATION,
        optimizer=momentum, optimizer_name=_DECAYED_SGD, learning_rate=0.1, plan=linear_decay,
        batch=128, epochs=20, target=0.98, inputs=Pixels(),
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
        optimizer=partial(momentum, weight_decay=5e-4), learning_rate=0.02, plan=steps_down(0.7, 0.9),
        optimizer_name="SGD, momentum 0.9, weight decay 0.0005, rate ÷ 10 at 70 % and 90 %",
        batch=128, epochs=60, target=0.8, inputs=ShiftedPixels(CIFAR_PIXELS, size=24, padding=0),
    ),
)  # fmt: skip

declare(
    "Two 5×5 convolutions and 512 units (354,250 parameters) on 24×24 crops of CIFAR-10.",
    Workload(
        name="cifar-cnn", dataset="cifar10", model="cifar-cnn", objective=CLASSIFICATION,
        optimizer=partial(momentum, weight_decay=5e-4), learning_rate=0.05, plan=linear_decay,
        optimizer_name="SGD, momentum 0.9, weight decay 0.0005, rate falling linearly to 0",
        batch=128, epochs=12, target=0.72, inputs=ShiftedPixels(CIFAR_PIXELS, size=24, padding=0),
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


@register("shakespeare-gpt")
def shakespeare_gpt(
    layers: int = 4, width: int = 256, heads: int = 4, length: int = 64, tied: bool = True
) -> Workload:
    """A decoder-only transformer on windows of 64 characters: 3.2 M parameters, 8 windows a step.

    Source: Karpathy, nanoGPT, `train_shakespeare_char.py` in its setting for a CPU (4 layers, batch 12 × 64, 2,000
    steps; test loss 1.88).
    Differs: twice as wide; each window once, not drawn with replacement.
    """
    return Workload(
        name="shakespeare-gpt",
        dataset="shakespeare",
        model=f"char-gpt(65, {length}, {layers}, {width}, {heads}, tied={tied})",
        objective=NEXT_CHARACTER,
        optimizer=adamw,
        optimizer_name="AdamW, betas (0.9, 0.99), decay of matrices 0.1, rate warmed up for 5 %, falling linearly to 0",
        learning_rate=0.001,
        batch=8,
        epochs=1,
        target=2.7,
        inputs=Tokens(),
        plan=warmed_up(0.05, linear_decay),
        data_options=(("length", length),),
    )


@register("linear")
def linear(features: int = 1000) -> Workload:
    """Linear regression on made data; noise leaves a squared error of 0.01, 0.0112 at best from 8,192 samples.

    Source: Renggli et al., SparCML, 2018 (linear regression).
    """
    return Workload(
        name="linear",
        dataset="linear",
        model=f"linear({features})",
        objective=REGRESSION,
        optimizer=plain,
        optimizer_name="SGD, rate falling linearly to 0",
        learning_rate=0.2,
        batch=64,
        epochs=15,
        target=0.012,
        plan=linear_decay,
        data_options=(("features", features),),
    )


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
    falls, epochs = steps_down(0.5, 0.75), 164  # 64 k steps of 128 images
    return Workload(
        name="cifar-resnet",
        dataset="cifar10",
        model=f"cifar-resnet({depth})",
        objective=CLASSIFICATION,
        optimizer=partial(momentum, weight_decay=1e-4),
        optimizer_name="SGD, momentum 0.9, weight decay 0.0001, rate ÷ 10 at 50 % and 75 %",
        learning_rate=0.1,
        batch=128,
        epochs=epochs,
        target=0.9 if depth < 56 else 0.92,
        inputs=ShiftedPixels(CIFAR_PIXELS, size=32, padding=4),
        plan=warmed_up(1 / epochs, falls) if depth >= 110 else falls,
    )
