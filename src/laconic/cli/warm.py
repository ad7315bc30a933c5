"""`laconic warm`: compile every kernel ahead."""

from __future__ import annotations

import os
import time

import typer

from laconic.ahead import compile_all
from laconic.cli.catalogue import catalogue


def warm() -> None:
    """Compile all kernels ahead of time into Numba's cache, for example in a container image.

    The cache is in NUMBA_CACHE_DIR if that is set, else beside the package or in the user's cache folder.
    """
    begun = time.perf_counter()
    groups = sum(1 for _ in compile_all())
    catalogue()  # so that `laconic codecs`, and what is no codec, is answered at once
    folder = os.environ.get("NUMBA_CACHE_DIR")
    where = f", kept in {folder}" if folder else ""
    typer.echo(f"compiled the kernels of {groups} codecs and rules in {time.perf_counter() - begun:.0f} s{where}")
