"""The methods of convolution, a file each; adding one is adding a file."""

from __future__ import annotations

from laconic.registry import discover

discover(__name__, __path__)
