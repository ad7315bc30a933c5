"""Measure a method's error, and judge it against the tolerance.

Callers: the tuner, benchmarks. An error is relative to the largest output:
max|y − y₆₄| / max|y₆₄|, y₆₄ torch's convolution in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.operators.method import Method, build
from laconic.operators.methods.native import convolution
from laconic.operators.shape import Convolution


def checked_tolerance(tolerance: float | str) -> float | str:
    """`tolerance` if it is one: a positive number or "native"."""
    if tolerance == "native":
        return tolerance
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
        raise BadInput(f"tolerance is a positive number or 'native', not {tolerance!r}")
    return float(tolerance)


class Judge:
    """Judges methods by the exact output for one sample of the example and one of random values.

    Args:
        conv: what is computed; one sample of it is enough, as samples do not meet.
        x: an input of the example.
        weight: the layer's.
    """

    def __init__(self, conv: Convolution, x: Tensor, weight: Tensor) -> None:
        self.conv = conv.with_batch(1)
        self.weight = weight.detach()
        rng = torch.Generator().manual_seed(0)
        noise = torch.randn(self.conv.input_shape, generator=rng, dtype=x.dtype)
        self.inputs = [x.detach()[:1].contiguous(), noise]
        exact = [exact_output(each, self.weight, self.conv) for each in self.inputs]
        self.exact = [(y, max(float(y.abs().max()), 1e-300)) for y in exact]

    def error(self, method: Method) -> float:
        """The larger of the two relative errors; infinity if anything is not finite."""
        prepared, worst = method.prepare(self.weight, self.conv), 0.0
        for x, (exact, largest) in zip(self.inputs, self.exact, strict=True):
            off = float((method.run(x, prepared, None, self.conv).double() - exact).abs().max()) / largest
            worst = max(worst, off if math.isfinite(off) else math.inf)
        return worst

    def allowed(self, tolerance: float | str) -> float:
        """The largest error admitted; "native": that of the plain sum, in float32, or of torch's own.

        Raises:
            BadInput: not even torch's own convolution is within the tolerance.
        """
        native = self.error(build("native"))
        if tolerance == "native":
            return max(native, self.error(build("direct")))
        assert isinstance(tolerance, float)
        if native > tolerance:
            here = f"torch's own convolution is off by {native:.1e} for {self.conv}"
            raise BadInput(f"no method meets a tolerance of {tolerance:g}: {here}; allow at least that")
        return tolerance


def exact_output(x: Tensor, weight: Tensor, conv: Convolution) -> Tensor:
    """The output in float64.

    torch writes all patches out in float64, 4 GB for 4096 taps of 8 channels: wide kernels go by spectra, whose
    error in float64 is a billionth of what is judged.
    """
    double = replace(conv, dtype="float64")
    if max(conv.kernel) <= 64:
        return convolution(x.double(), weight.double(), None, double)
    method = build("fft")
    return method.run(x.double(), method.prepare(weight.double(), double), None, double)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """max|found − exact| / max|exact|."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    return float((found - exact).abs().max()) / largest if largest else 0.0
