"""The consistency modes, by family. Importing this package registers every mode in the folder: there is no list."""

from __future__ import annotations

from laconic.registry import discover

discover(__name__, __path__)
