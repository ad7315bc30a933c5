"""Shrink a model for shipping: prune weights, let the rest share few values, code them, run from the small file.

Callers: users, through `laconic.shrink` and `laconic.load_shrunk`; `laconic shrink` and `laconic inspect`.

    door.py      shrink, load_shrunk, Shrunk
    plan.py      the plan, and its execution
    search.py    densities and bits under a budget
    training.py  retraining and evaluation
    prune.py     which weights go; retrain.py keeps them at zero, and shared ones equal, during training
    share.py     few values for many weights; parts.py is the result
    coder/       symbols to bytes; file.py is the file, report.py its table
    sparse_layers.py   layers that compute with the remaining weights; low_rank.py thinner layers
"""

from __future__ import annotations

from laconic.shrinking import share
from laconic.shrinking.door import Shrunk, encode_exactly, load_shrunk, shrink
from laconic.shrinking.file import Reader, write
from laconic.shrinking.low_rank import factorise
from laconic.shrinking.plan import Plan
from laconic.shrinking.prune import magnitude
from laconic.shrinking.report import report
from laconic.shrinking.retrain import masked, shared

__all__ = ["Plan", "Reader", "Shrunk", "encode_exactly", "factorise", "load_shrunk", "magnitude", "masked", "report",
           "share", "shared", "shrink", "write"]  # fmt: skip
