"""Memory of large vectors, given back to the system before the whole allocation is free.

Caller: `residuals.py`. When DDP makes its buckets anew, one vector becomes parts of several, bucket by bucket. Without
this it would stay resident until the last has taken its part.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor


def give_back(values: Tensor) -> None:
    """Let the system have the whole pages of `values`, contiguous and on the CPU, which are read by nobody any more."""
    if sys.platform != "linux" or values.device.type != "cpu" or not values.is_contiguous():
        return
    page = mmap.PAGESIZE
    first = -(-values.data_ptr() // page) * page
    nbytes = (values.data_ptr() + values.nbytes) // page * page - first
    if nbytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)
