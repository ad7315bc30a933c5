"""List what users can name, without the seconds that importing torch takes: codecs, their options, workloads, peers.

Callers: `laconic codecs` lists it, and `laconic.cli.main` refuses unknown names by it. It is made from
the registries when they are first imported, and kept in the user's cache folder under a checksum of the source.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from laconic.errors import PayloadError, StorageError, UnknownName
from laconic.specs import split
from laconic.storage import files, json_text

NUMEL = 1_000_000  # bits per element are those of a tensor of this length, header and scales included
PACKAGE = Path(__file__).parents[1]
SOURCES = ("codecs/**/*.py", "workloads/**/*.py", "lab/runs/strategies.py")
OWN = ("single", "auto")  # neither codecs nor peers
_BUILT = re.compile(r"(?:^|[,:+/])\s*([\w-]+)(\([^()]*\))")  # with arguments; what follows @ is a mode
_PLAIN = re.compile(r"\s*(?:(?:compress|distribute|elastic):)?([\w+-]+)(?:@.*)?\s*")  # without arguments


def catalogue() -> dict[str, Any]:
    """The catalogue: "codecs" as `laconic codecs --json` prints them, names of "workloads" and "peers"."""
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


def check(words: Sequence[str]) -> None:
    """Raise UnknownName where the workload that follows `train` or `compare`, or a codec to train by, is unknown.

    One's own workload, module:factory, which may bring codecs, and one with arguments are left to the command; so are
    the values of options, and everything where no catalogue is kept.
    """
    if "laconic.workloads" in sys.modules:  # the registry is there already, and may know others
        return
    if len(words) < 2 or words[0] not in ("train", "compare") or not re.fullmatch(r"\w[\w-]*", words[1]):
        return
    if (known := kept()) is None:
        return
    if words[1] not in known["workloads"]:
        raise UnknownName("workload", words[1], known["workloads"])
    options = {entry["name"]: entry["options"] for entry in known["codecs"]}
    for option, value in pairwise(words):
        if option in ("--codec", "--configs"):
            _check_codecs(value, options, known["peers"])


def _check_codecs(configurations: str, options: dict[str, list[str]], peers: Sequence[str]) -> None:
    """Refuse what `lab/runs/spec.py` refuses, by the same sentence; what is more than names is left to it."""
    plain = re.sub(r"\([^()]*\)", "", configurations)
    for part in plain.split(",") if "(" not in plain else ():
        first, *others = found[1].split("+") if (found := _PLAIN.fullmatch(part)) else [""]
        if first and first not in (valid := {*options, *peers, *OWN}):
            raise UnknownName("configuration", first, valid)
        for other in others:
            if other not in options:
                raise UnknownName("codec", other, options)
    for name, arguments in _BUILT.findall(configurations):
        for key, _ in split("codec", name + arguments)[1] if name in options else ():
            if key is not None and key not in options[name]:
                raise UnknownName(f"option of codec '{name}'", key, options[name])


def _path() -> Path:
    source = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern)):
        source.update(path.read_bytes())
    return files.cache_folder() / f"catalogue-{source.hexdigest()[:16]}.json"


def _made() -> dict[str, Any]:
    """The catalogue, by the registries; a matrix or lossless codec has no size of its own for a flat vector."""
    from laconic import workloads
    from laconic.codecs import codec, get, names
    from laconic.lab.bench.codec_speed import simplest_spec
    from laconic.lab.runs.strategies import PEERS

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
    return {"codecs": codecs, "workloads": workloads.names(), "peers": list(PEERS)}
