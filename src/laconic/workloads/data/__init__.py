"""Datasets, read without torchvision: from `LACONIC_DATA`, a folder the user names, or their public addresses.

Callers: `workloads`. `load("mnist")` gives a `Dataset` of plain tensors; `names()` lists what can be loaded. The
default, scikit-learn's digits, needs no file and no network.
"""

from __future__ import annotations

from laconic.workloads.data import images, linear, rcv1, shakespeare  # noqa: F401  (registers the datasets)
from laconic.workloads.data.catalogue import fetch, load, names
from laconic.workloads.data.split import Dataset, SparseBatch, SparseRows, Split
from laconic.workloads.order import EpochOrder

__all__ = ["Dataset", "EpochOrder", "SparseBatch", "SparseRows", "Split", "fetch", "load", "names"]
