"""Datasets, read without torchvision: from `LACONIC_DATA`, a folder the user names, or their public addresses.

Callers: `lab.workloads`. `load("mnist")` gives a `Dataset` of plain tensors; `names()` lists what can be loaded. The
default, scikit-learn's digits, needs no file and no network.
"""

from __future__ import annotations

from laconic.lab.data import images, linear, rcv1, shakespeare  # noqa: F401  (registers the datasets)
from laconic.lab.data.catalogue import fetch, load, names
from laconic.lab.data.order import EpochOrder
from laconic.lab.data.split import Dataset, SparseBatch, SparseRows, Split

__all__ = ["Dataset", "EpochOrder", "SparseBatch", "SparseRows", "Split", "fetch", "load", "names"]
