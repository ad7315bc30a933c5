"""The methods of convolution, one per file; to add one, add a file."""

from __future__ import annotations

from laconic.registry import discover

discover(__name__, __path__)
