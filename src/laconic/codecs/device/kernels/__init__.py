"""Triton kernels for codecs, one family a file; loaded only where Triton is installed and the device has it.

Callers: `ways.py`. A file registers a `BodyWay` under the names of the codecs that it serves, and lists as `ahead`
which kernels it launches: the tests compile those for every architecture, and count what they load and store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.registry import Registry

if TYPE_CHECKING:
    from laconic.codecs.device.shell import BodyWay

KERNELS: Registry[type[BodyWay]] = Registry("kernel", "laconic.codecs.device.kernels")
register = KERNELS.register
