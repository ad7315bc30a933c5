"""Where kernels get compiled: Numba's `njit` with its cache on disk, wherever there is room for one.

Callers: every module with kernels. Numba keeps what it compiled beside the source or in the user's cache folder, and
refuses to define a function that it can keep in neither: in a read-only container, or for a user without a home, not
even `import` would succeed. There, kernels are kept in a temporary folder of this job, which goes with it, or compiled
in every process; a warning says which. `laconic warm` fills the cache ahead, for images.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
F = TypeVar("F", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[F], F]:
    """Decorate a kernel, as `numba.njit(**options)` does; without room for its cache it is compiled in memory."""

    def compiled(function: F) -> F:
        try:
            kernel: F = numba.njit(**options)(function)
        except RuntimeError:  # "cannot cache function …: no locator available for file …"
            try:
                folder = _use_temporary_folder()
                kernel = numba.njit(**options)(function)
                _warn_once(f"compiled again for this job and kept in {folder} until it ends")
            except (OSError, RuntimeError):
                _warn_once("compiled again in every process, which takes seconds")
                kernel = numba.njit(**{**options, "cache": False})(function)
        return kernel

    return compiled


@functools.cache
def _use_temporary_folder() -> str:
    """Keep kernels in a private folder that processes started from here share and that this one removes at its end."""
    folder = tempfile.mkdtemp(prefix="laconic-kernels-")
    atexit.register(_remove, folder, os.getpid())
    os.environ["NUMBA_CACHE_DIR"] = folder
    numba.config.reload_config()  # type: ignore[no-untyped-call]
    return folder


@functools.cache
def _warn_once(how: str) -> None:
    why = "neither the package nor the user's cache folder can be written"
    cure = "set NUMBA_CACHE_DIR to a folder that can be"
    warnings.warn(f"kernels are {how}, since {why}; {cure}", RuntimeWarning, stacklevel=3)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
