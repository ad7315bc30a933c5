"""What a model costs beside what was published: memory of VGG-16 by layer, multiply-adds, energy.

    python -m benchmarks cost-published vgg16

Figures are as printed; units of 1,024 bytes where the source uses them.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from laconic.cli.shared import count_option, echo_table
from laconic.planner.cost import LayerCost, cost
from laconic.planner.formulas import dram_joules

_KIB, _MIB = 2**10, 2**20


class MemoryRow(NamedTuple):
    """A layer of the published table: bytes of weights and of outputs, for one image; 0 where there are none."""

    layer: str
    weight_nbytes: float
    output_nbytes: float


# Source: Kim (after Fatahalian, CMU 15-769), Efficiently Evaluating Deep Networks: "VGG memory footprint", batch 1.
VGG16_MEMORY = (
    MemoryRow("conv1_1", 6.5 * _KIB, 12.3 * _MIB), MemoryRow("conv1_2", 144 * _KIB, 12.3 * _MIB),
    MemoryRow("maxpool1", 0, 3.1 * _MIB), MemoryRow("conv2_1", 228 * _KIB, 6.2 * _MIB),
    MemoryRow("conv2_2", 576 * _KIB, 6.2 * _MIB), MemoryRow("maxpool2", 0, 1.5 * _MIB),
    MemoryRow("conv3_1", 1.1 * _MIB, 3.1 * _MIB), MemoryRow("conv3_2", 2.3 * _MIB, 3.1 * _MIB),
    MemoryRow("conv3_3", 2.3 * _MIB, 3.1 * _MIB), MemoryRow("maxpool3", 0, 766 * _KIB),
    MemoryRow("conv4_1", 4.5 * _MIB, 1.5 * _MIB), MemoryRow("conv4_2", 9 * _MIB, 1.5 * _MIB),
    MemoryRow("conv4_3", 9 * _MIB, 1.5 * _MIB), MemoryRow("maxpool4", 0, 383 * _KIB),
    MemoryRow("conv5_1", 9 * _MIB, 383 * _KIB), MemoryRow("conv5_2", 9 * _MIB, 383 * _KIB),
    MemoryRow("conv5_3", 9 * _MIB, 383 * _KIB), MemoryRow("maxpool5", 0, 98 * _KIB),
    MemoryRow("fc6", 392 * _MIB, 16 * _KIB), MemoryRow("fc7", 64 * _MIB, 16 * _KIB),
    MemoryRow("fc8", 15.6 * _MIB, 4 * _KIB),
)  # fmt: skip

# A network of a billion weights that is evaluated 20 times a second. Source: the same slides, "Reducing network
# footprint".
ENERGY_PARAMETERS, ENERGY_HERTZ, ENERGY_WATTS = 1e9, 20.0, 12.8

# Multiply-adds of one 224×224 image, in 10⁹. Source: torchvision, table of classification weights ("GFLOPS").
MULTIPLY_ADDS = {
    "alexnet": 0.71, "vgg16": 15.47, "vgg19": 19.63, "googlenet": 1.50, "resnet18": 1.81, "resnet50": 4.09,
    "densenet121": 2.83,
}  # fmt: skip


def main(
    model: Annotated[str, typer.Argument(help="A network by name, such as vgg16.")],
    batch: Annotated[int, count_option("Samples.")] = 1,
) -> None:
    """Print what `laconic cost` counts beside what was published."""
    found = cost(model, batch)
    if found.name in MULTIPLY_ADDS:
        ours = found.total("multiply_adds") / found.batch / 1e9
        theirs = MULTIPLY_ADDS[found.name]
        typer.echo(f"multiply-adds of an image: published {theirs} · 10⁹, here {ours:.4g} · 10⁹")
    if found.name == "vgg16":
        layers = [layer for layer in found.layers if layer.kind in ("Conv2d", "MaxPool2d", "Linear")]
        mib = 2**20
        rows = [
            [row.layer, f"{row.weight_nbytes / mib:.4g}", f"{kernel_nbytes(layer) / mib:.4g}",
             f"{row.output_nbytes / mib:.3g}", f"{layer.output_nbytes / found.batch / mib:.3g}"]
            for row, layer in zip(VGG16_MEMORY, layers, strict=True)
        ]  # fmt: skip
        echo_table(("layer", "weights, published", "here, without biases", "outputs, published", "here; MiB"), rows)
    watts = ENERGY_HERTZ * dram_joules(ENERGY_PARAMETERS)
    typer.echo(
        f"a network of 10⁹ weights, each read {ENERGY_HERTZ:g} times a second: published "
        f"{ENERGY_WATTS} W, here {watts:.3g} W"
    )


def kernel_nbytes(layer: LayerCost) -> int:
    """Weights without biases, as the table counts them."""
    biases = layer.output_shape[1] if layer.parameters else 0
    return layer.weight_nbytes - 4 * biases
