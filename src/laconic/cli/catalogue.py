"""List what users can name, without the seconds that importing torch takes: codecs, their options, workloads.

Callers: `laconic codecs` lists it, and commands refuse unknown names by it. It is made from the registries when they
are first imported, and kept in the user's cache folder under a checksum of the source.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Any

from laconic.errors import PayloadError, StorageError
from laconic.storage import files, json_text

NUMEL = 1_000_000  # bits per element are those of a tensor of this length, header and scales included
PACKAGE = Path(__file__).parents[1]
SOURCES = ("codecs/**/*.py", "workloads/**/*.py")


def catalogue() -> dict[str, Any]:
    """The catalogue: "codecs" as `laconic codecs --json` prints them, and the names of "workloads"."""
    found = kept()
    if found is None:
        found = _made()
        with contextlib.suppress(StorageError):
            files.replace(_path(), json_text.seal(found))
    return found


def kept() -> dict[str, Any] | None:
    """The catalogue, if it was made before."""
    with contextlib.suppress(OSError, PayloadError):  # not made yet, or damaged
        return json_text.unseal(_path().read_bytes())
    return None


def _path() -> Path:
    source = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern)):
        source.update(path.read_bytes())
    return files.cache_folder() / f"catalogue-{source.hexdigest()[:16]}.json"


def _made() -> dict[str, Any]:
    """The catalogue, by the registries; a matrix or lossless codec has no size of its own for a flat vector."""
    from laconic import workloads
    from laconic.codecs import codec, get, names, simplest_spec

    codecs = []
    for name in names():
        cls = get(name)
        built = codec(simplest_spec(name)) if cls.kind in ("quantiser", "selector") else None
        codecs.append({
            "name": name,
            "spec": str(built) if built is not None else name,
            "kind": cls.kind,
            "options": [each.name for each in fields(cls)],  # type: ignore[arg-type]
            "bits_per_element": 8 * built.max_nbytes(NUMEL) / NUMEL if built is not None else None,
            "fixed_size": (built or cls).fixed_size,
            "unbiased": (built or cls).unbiased is True,
            "stochastic": (built or cls).stochastic is True,
            "source": cls.source,
            "summary": cls.summary,
        })  # fmt: skip
    return {"codecs": codecs, "workloads": workloads.names()}
