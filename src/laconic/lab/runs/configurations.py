"""The ways of training by name: torch's own, one process alone, and ours as DOOR:CODEC@MODE.

    ddp  ddp-fp16  ddp-powersgd    the peers
    single                         one process with the whole batch
    compress:dynamic8              laconic.compress on DDP
    distribute:dynamic8            laconic.distribute
    distribute:none@local(8)       laconic.distribute(consistency="local(8)")
    elastic:dynamic8               laconic.elastic; for `laconic train`

A codec alone, `dynamic8`, is compressed on DDP, since the exchange then runs beside backward. With a mode, or on an
engine that DDP does not have (MPI), it is distributed.

Callers: `train`, `compare` and benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from laconic.codecs import codec
from laconic.codecs import names as codec_names
from laconic.consistency import build as build_mode
from laconic.consistency.churn.ways import way_for
from laconic.errors import BadInput, UnknownName
from laconic.exchange.auto import coded_names
from laconic.exchange.options import flat_codec
from laconic.lab.records.record import DOORS, Configuration, Door
from laconic.lab.runs.strategies import PEERS

SINGLE = "single"
_NAME = re.compile(r"(?:([a-z]+):)?([^@:]+)(?:@(.+))?")


def configuration(name: str, workers: int, algorithm: str = "auto", engine: str = "gloo") -> Configuration:
    """The configuration a name means.

    >>> [configuration(name, 4).name for name in ("ddp", "dynamic8", "none@local(4)")]
    ['ddp', 'compress:dynamic8', 'distribute:none@local(4)']

    Raises:
        UnknownName: none of these; the valid ones are listed.
        BadInput: a codec's arguments that it does not take, or a codec or mode that does not go with the door.
    """
    valid = coded_names()
    if algorithm not in valid:
        raise UnknownName("compressed all-reduce algorithm", algorithm, valid)
    if name == SINGLE:
        return Configuration(SINGLE, "single", "none", "none", "none", 1, "none")
    if name in PEERS:
        peer = PEERS[name]
        return Configuration(name, "peer", peer.codec, "ddp", "sync", workers, "gloo", dict(peer.options))
    door, spec, mode = parse(name)
    if door == "elastic":
        return _elastic(spec, mode, workers, algorithm)
    _check_codec(spec)
    mode = str(build_mode(mode))
    door = door or ("compress" if mode == "sync" and engine == "gloo" else "distribute")
    if door == "compress" and (mode != "sync" or engine != "gloo"):
        cure = f"use distribute:{spec}@{mode}"
        raise BadInput(f"'{name}': compress is DDP's, which agrees at every step, on gloo; {cure}")
    return Configuration(_full(door, spec, mode), door, spec, algorithm, mode, workers, engine)


def parse(name: str) -> tuple[Door | None, str, str]:
    """Door, codec and mode of a name; the mode is sync where none is named.

    >>> parse("distribute:topk(0.01)+qsgd(4)@local(8)")
    ('distribute', 'topk(0.01)+qsgd(4)', 'local(8)')

    Raises:
        BadInput: not of the form DOOR:CODEC@MODE.
    """
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise BadInput(f"a configuration is a codec, DOOR:CODEC or DOOR:CODEC@MODE, got '{name}'")
    if found[1] is not None and found[1] not in DOORS:
        raise UnknownName("door", found[1], DOORS)
    return cast(Door | None, found[1]), found[2].strip(), (found[3] or "sync").strip()


def with_mode(name: str, mode: str, door: Door | None = None) -> str:
    """The same configuration by another mode, and door if one is named; peers and `single` have their own.

    >>> with_mode("dynamic8", "local(8)"), with_mode("ddp", "local(8)"), with_mode("none", "sync", "elastic")
    ('dynamic8@local(8)', 'ddp', 'elastic:none')
    """
    if name in (*PEERS, SINGLE):
        return name
    own_door, spec, own_mode = parse(name)
    door, mode = door or own_door, mode if own_mode == "sync" else own_mode
    return _full(door, spec, mode)


def _full(door: str | None, spec: str, mode: str) -> str:
    return (f"{door}:" if door else "") + spec + ("" if mode == "sync" else f"@{mode}")


def _check_codec(spec: str) -> None:
    if spec == "auto":
        return
    first = re.split(r"[(+]", spec)[0].strip()
    if first not in codec_names():
        raise UnknownName("configuration", first, [*codec_names(), *PEERS, SINGLE, "auto"])
    codec(spec)  # refuses arguments that do not fit


def _elastic(spec: str, mode: str, workers: int, algorithm: str) -> Configuration:
    if algorithm != "auto":
        raise BadInput("--elastic has its own exchange, by a coordinator: it takes no --algorithm")
    if spec == "auto":
        raise BadInput("--codec auto chooses for all-reduces, which --elastic does not use; name a codec")
    flat_codec(spec)
    way = str(way_for(mode, workers))
    return Configuration(_full("elastic", spec, way), "elastic", spec, "coordinator", way, workers, "zmq")


def combined(names: Sequence[str], modes: Sequence[str], workers: int) -> list[Configuration]:
    """Every codec with every mode; peers and `single`, which have their own, once.

    >>> [each.name for each in combined(["ddp", "none"], ["sync", "local(4)"], 4)]
    ['ddp', 'compress:none', 'distribute:none@local(4)']
    """
    made = [configuration(with_mode(name, mode), workers) for name in names for mode in modes]
    return list({each.name: each for each in made}.values())


def split(text: str) -> list[str]:
    """Split at commas outside parentheses.

    >>> split("ddp, topk(16, bucket=512)+qsgd(4)")
    ['ddp', 'topk(16, bucket=512)+qsgd(4)']

    Raises:
        BadInput: nothing is named, or something twice.
    """
    found = [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]
    if not found:
        raise BadInput("no configuration is named; write for example ddp,compress:dynamic8,distribute:dynamic8")
    if twice := [name for name in found if found.count(name) > 1]:
        raise BadInput(f"configuration '{twice[0]}' is named twice")
    return found
