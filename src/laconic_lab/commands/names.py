"""Refuse unknown workloads and codecs of `train` and `compare` before torch is imported, by the kept catalogue."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise

from laconic.cli.catalogue import kept
from laconic.errors import BadInput, UnknownName
from laconic.specs import split

PEERS = ("ddp", "ddp-fp16", "ddp-powersgd")  # those of `runs/strategies.py`, which imports torch
OWN = ("single", "auto")  # neither codecs nor peers
NO_WORKLOAD = "name a workload ({}, or module:factory), or --resume a run"
_BUILT = re.compile(r"(?:^|[,:+/])\s*([\w-]+)(\([^()]*\))")  # with arguments; what follows @ is a mode
_PLAIN = re.compile(r"\s*(?:(?:compress|distribute|elastic):)?([\w+-]+)(?:@.*)?\s*")  # without arguments


def check(words: Sequence[str]) -> None:
    """Raise UnknownName where the workload that follows `train` or `compare`, or a codec to train by, is unknown.

    One's own workload, module:factory, which may bring codecs, and one with arguments are left to the command; so are
    the values of options, and everything where no catalogue is kept.
    """
    if "laconic.workloads" in sys.modules:  # the registry is there already, and may know others
        return
    if not words or words[0] not in ("train", "compare"):
        return
    if len(words) == 1 and (known := kept()) is not None:
        raise BadInput(NO_WORKLOAD.format(", ".join(known["workloads"])))
    if len(words) == 1 or not re.fullmatch(r"\w[\w-]*", words[1]):
        return
    if (known := kept()) is None:
        return
    if words[1] not in known["workloads"]:
        raise UnknownName("workload", words[1], known["workloads"])
    options = {entry["name"]: entry["options"] for entry in known["codecs"]}
    for option, value in pairwise(words):
        if option in ("--codec", "--configs"):
            _check_codecs(value, options, PEERS)


def _check_codecs(configurations: str, options: dict[str, list[str]], peers: Sequence[str]) -> None:
    """Refuse what `runs/spec.py` refuses, by the same sentence; what is more than names is left to it."""
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
