"""How a layer is divided: one form a file; adding one is adding a file."""

from __future__ import annotations

from laconic.registry import discover

discover(__name__, __path__)
