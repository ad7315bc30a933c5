"""Datasets, read without torchvision: from `LACONIC_DATA`, a folder the user names, or their public addresses.

Callers: `workloads`. `load("mnist")` gives a `Dataset` of plain tensors; `names()` lists what can be loaded. The
default, scikit-learn's digits, needs no file and no network.
"""

from __future__ import annotations

from laconic.registry import discover
from laconic.workloads.data.catalogue import dataset, fetch, load, names
from laconic.workloads.data.split import Dataset, SparseBatch, SparseRows, Split
from laconic.workloads.order import EpochOrder

__all__ = ["Dataset", "EpochOrder", "SparseBatch", "SparseRows", "Split", "dataset", "fetch", "load", "names"]

discover(__name__, __path__)
