"""Plain torch operations for codecs that have no kernel, or none for their options, one family a file.

Callers: `ways.py`. A file registers `Bodies` under the names of the codecs that it serves. Every operation rounds
by itself, as the processor's kernels do: no `addcmul`, no scalar divided by a tensor (torch takes the inverse).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.registry import Registry

if TYPE_CHECKING:
    from laconic.codecs.device.plain.shell import Bodies

PLAIN: Registry[type[Bodies]] = Registry("plain way", "laconic.codecs.device.plain")
register = PLAIN.register
