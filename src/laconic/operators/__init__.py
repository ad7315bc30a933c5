"""How a layer is computed: convolutions by several methods, recurrent layers, and a tuner that picks the quickest.

    shape.py        what a convolution computes, as a record
    method.py       what a method is; the registry
    methods/        native, direct, im2col, fft, winograd, prepacked: a file each
    convolve.py     a convolution by named methods, with gradients
    tuning.py       `tune` and `untune`: which layers of a model gain by which methods
    search.py       the quickest admitted method of one convolution, by time and error: timing.py, method_error.py
    recurrent.py    LSTM and GRU whose backward pass keeps as much as one allows; cells.py their steps, bptt.py the plan
    products.py     matrix products whose sums stay in registers; vectors.py the innermost loops
    scratch.py      workspaces that are kept, results in huge pages
    tuned_layers.py the layers that follow a plan; plan.py the plan as a table; model_error.py judges the whole model
    micro_batch.py  how a batch is divided; machine.py what was measured on this one

Callers: `laconic.tune`, benchmarks, the planner's costs.
"""

from __future__ import annotations

from laconic.operators import methods  # noqa: F401  (registers them)
from laconic.operators.convolve import convolve
from laconic.operators.method import Method, MethodCost, build, candidates, examples, get, names, register
from laconic.operators.recurrent import GRU, LSTM
from laconic.operators.shape import Convolution
from laconic.operators.tuning import plan_of, tune, untune

__all__ = [
    "GRU",
    "LSTM",
    "Convolution",
    "Method",
    "MethodCost",
    "build",
    "candidates",
    "convolve",
    "examples",
    "get",
    "names",
    "plan_of",
    "register",
    "tune",
    "untune",
]
