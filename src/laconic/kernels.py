"""Where kernels get compiled: Numba's `njit` with its cache on disk, wherever there is room for one.

Callers: every module with kernels. Numba keeps what it compiled beside the source or in the user's cache folder, and
refuses to define a function that it can keep in neither: in a read-only container, or for a user without a home, not
even `import` would succeed. There, kernels are kept in a temporary folder of this job, which goes with it, or compiled
in every process; a warning says which. `laconic warm` fills the cache ahead, for images.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

Array = np.ndarray[Any, np.dtype[Any]]
F = TypeVar("F", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[F], F]:
    """Decorate a kernel, as `numba.njit(**options)` does; without room for its cache it is compiled in memory."""

    def compiled(function: F) -> F:
        try:
            kernel = _compiled(function, options)
        except RuntimeError:  # "cannot cache function …: no locator available for file …"
            try:
                folder = _use_temporary_folder()
                kernel = _compiled(function, options)
                _warn_once(f"compiled again for this job and kept in {folder} until it ends")
            except (OSError, RuntimeError):
                _warn_once("compiled again in every process, which takes seconds")
                kernel = _compiled(function, {**options, "cache": False})
        return kernel

    return compiled


def _compiled(function: F, options: dict[str, Any]) -> F:
    options = {"no_cfunc_wrapper": True, **options}  # nobody calls kernels from C, and wrappers take time to compile
    kernel: Any = numba.njit(**options)(function)
    if options.get("cache") and function.__closure__ is not None:
        kernel._cache = _ClosureCache(function)  # type: ignore[no-untyped-call]
    made: F = kernel
    return made


class _ClosureCache(FunctionCache):
    """Numba's cache on disk for a kernel that a function makes out of others.

    Numba's own key has a random number for every kernel in the closure: it would compile them again in each process.
    Here they are known by their source and what is in their own closures.
    """

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        text = repr(_described(self._py_func))
        return sig, codegen.magic_tuple(), hashlib.sha256(text.encode()).hexdigest()


def _described(value: Any) -> Any:
    """A key that is equal for equal values in every process, and changes with a function's file."""
    value = getattr(value, "py_func", getattr(value, "_defn", value))  # of a kernel, of an intrinsic
    if (code := getattr(value, "__code__", None)) is not None:
        cells = tuple(_described(cell.cell_contents) for cell in value.__closure__ or ())
        return value.__module__, value.__qualname__, code.co_code, _digest(code.co_filename), cells
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return value if isinstance(value, str | bytes | int | float | None) else dumps(value)  # type: ignore[no-untyped-call]


@functools.cache
def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


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
