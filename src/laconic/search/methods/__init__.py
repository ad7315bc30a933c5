"""The ways of searching, one file each."""

from __future__ import annotations

from laconic.registry import discover
from laconic.search.methods.base import Method, build, names, register

__all__ = ["Method", "build", "names", "register"]

discover(__name__, __path__)
