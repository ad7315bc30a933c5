"""What Deep Compression published, layer by layer, and our tables beside it.

Caller: `python -m benchmarks shrink`.

Source: Han, Mao, Dally, Deep Compression: Compressing Deep Neural Networks with Pruning, Trained Quantization and
Huffman Coding, ICLR 2016, Tables 2, 3 and 5: after pruning, sharing and Huffman coding. A layer's size is its codebook
and its kept share times its bits; fully connected layers take up to a quarter more. The bits of a whole network are as
printed, and do not follow from those of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.shrinking.report import HEADINGS, Report

BESIDE = (*HEADINGS, "paper: kept %", "weight bits", "index bits", "ratio")


@dataclass(frozen=True)
class Layer:
    """A row of the paper: kept % of the weights, bits of a value and of its place, size in % of float32."""

    kept: float
    weight_bits: float
    index_bits: float
    size: float

    def cells(self) -> list[str]:
        """As a table shows it."""
        return [f"{self.kept:g}", f"{self.weight_bits:g}", f"{self.index_bits:g}", f"{100 / self.size:.1f}×"]


@dataclass(frozen=True)
class Published:
    """A network of the paper: its layers, in order, the whole, and its errors in %."""

    layers: tuple[Layer, ...]
    whole: Layer
    error: float
    dense_error: float


PAPER = {
    "lenet-300-100": Published(
        (Layer(8, 4.4, 3.7, 2.32), Layer(9, 4.4, 4.3, 3.04), Layer(26, 4.3, 3.2, 12.70)),
        Layer(8, 5.1, 3.7, 2.49), 1.58, 1.64,
    ),
    "lenet-5": Published(
        (Layer(66, 7.2, 1.5, 67.45), Layer(12, 7.2, 3.9, 5.28), Layer(8, 4.5, 4.5, 2.45), Layer(19, 5.2, 3.7, 6.13)),
        Layer(8, 4.1, 4.4, 2.55), 0.74, 0.80,
    ),
    "vgg16": Published(
        (Layer(58, 6.8, 1.7, 29.97), Layer(22, 6.5, 2.6, 6.99), Layer(34, 5.6, 2.4, 8.91), Layer(36, 5.9, 2.3, 9.31),
         Layer(53, 4.8, 1.8, 11.15), Layer(24, 4.6, 2.9, 5.67), Layer(42, 4.6, 2.2, 8.96), Layer(32, 4.6, 2.6, 7.29),
         Layer(27, 4.2, 2.9, 5.93), Layer(34, 4.4, 2.5, 7.47), Layer(35, 4.7, 2.5, 8.00), Layer(29, 4.6, 2.7, 6.52),
         Layer(36, 4.6, 2.3, 7.79), Layer(4, 3.6, 3.5, 1.10), Layer(4, 4.0, 4.3, 1.25), Layer(23, 4.0, 3.4, 5.24)),
        Layer(7.5, 4.1, 3.1, 2.05), 31.17, 31.50,
    ),
}  # fmt: skip


def beside(report: Report, network: str) -> list[list[str]]:
    """Our table of a network that the paper has, with the paper's numbers at the end of its lines."""
    published = PAPER[network]
    layers = iter(published.layers)
    lines = []
    for row, cells in zip(report.rows, report.table(), strict=False):
        layer = next(layers, None) if row.name.endswith("weight") else None
        lines.append(cells + (layer.cells() if layer else [""] * 4))
    header, whole = report.table()[-2:]
    return [*lines, header + [""] * 4, whole + published.whole.cells()]
