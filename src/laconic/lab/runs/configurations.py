"""The ways of training that are compared: ours by a codec's spec, the peers by name, and one process alone.

Callers: `train` and `compare` make configurations from what the user writes; the trainer makes a model train by one.
Peers are torch's own, as people use them: DDP, DDP with its fp16 hook, DDP with its PowerSGD hook.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.codecs import codec
from laconic.codecs import names as codec_names
from laconic.consistency import Agreement
from laconic.consistency import build as consistency_mode
from laconic.consistency.distribute import distribute
from laconic.consistency.modes.sync import SyncAgreement
from laconic.errors import BadInput, UnknownName
from laconic.exchange.state import CompressionState
from laconic.lab.records.record import Configuration, Layer
from laconic.schedules.registry import names as algorithm_names
from laconic.transports.world import World

SINGLE = "single"
# torch's default rank; its 1000 steps of plain float32 are left out, or short runs would not compress at all
POWERSGD = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}


@dataclass(frozen=True)
class Peer:
    """A peer: how it wraps a model, and how many bytes it makes of a parameter's gradient, before the all-reduce."""

    codec: str
    wrap: Callable[[nn.Module], nn.Module]
    nbytes: Callable[[Sequence[int]], float]
    options: dict[str, Any]


def _fp16(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return wrapped


def _powersgd(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
    # Its second all-reduce starts in a callback: with two buckets, ranks disagree on the order and gloo aborts.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=max(25, math.ceil(nbytes / 2**20) + 1))
    wrapped.register_comm_hook(PowerSGDState(None, **POWERSGD), powerSGD_hook)  # type: ignore[arg-type]
    return wrapped


def _powersgd_nbytes(shape: Sequence[int]) -> float:
    """The two factors of a matrix; vectors, and what would not shrink by half, whole. One column, as set above."""
    if len(shape) < 2:
        return 4.0 * math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return 4.0 * (rows + columns if 2 * (rows + columns) < rows * columns else rows * columns)


PEERS = {
    "ddp": Peer("none", DistributedDataParallel, lambda shape: 4.0 * math.prod(shape), {}),
    "ddp-fp16": Peer("fp16", _fp16, lambda shape: 2.0 * math.prod(shape), {}),
    "ddp-powersgd": Peer("powersgd", _powersgd, _powersgd_nbytes, POWERSGD),
}


def configuration(
    name: str, workers: int, algorithm: str = "auto", consistency: str = "sync", engine: str = "gloo"
) -> Configuration:
    """The configuration a name means: a peer, `single`, or a codec's spec.

    >>> configuration("dynamic8", 4).kind, configuration("ddp", 4).kind
    ('laconic', 'peer')

    Raises:
        UnknownName: none of these; the valid ones are listed.
        BadInput: a codec's arguments that it does not take.
    """
    consistency = str(consistency_mode(consistency))
    called = name if consistency == "sync" else consistency if name == "none" else f"{name} {consistency}"
    valid = {"auto", "gather", *algorithm_names("all_reduce")}
    if algorithm not in valid:
        raise UnknownName("compressed all-reduce algorithm", algorithm, valid)
    if name == SINGLE:
        return Configuration(SINGLE, "single", "none", "none", "none", 1, "none")
    if name in PEERS:
        peer = PEERS[name]
        return Configuration(name, "peer", peer.codec, "ddp", "sync", workers, "gloo", dict(peer.options))
    if name != "auto":
        first = re.split(r"[(+]", name)[0].strip()
        if first not in codec_names():
            raise UnknownName("configuration", first, [*codec_names(), *PEERS, SINGLE, "auto"])
        codec(name)  # refuses arguments that do not fit
    return Configuration(called, "laconic", name, algorithm, consistency, workers, engine)


def split(text: str) -> list[str]:
    """Split at commas outside parentheses.

    >>> split("ddp, topk(16, bucket=512)+qsgd(4)")
    ['ddp', 'topk(16, bucket=512)+qsgd(4)']

    Raises:
        BadInput: nothing is named, or something twice.
    """
    found = [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]
    if not found:
        raise BadInput("no configuration is named; write for example ddp,none,dynamic8")
    if twice := [name for name in found if found.count(name) > 1]:
        raise BadInput(f"configuration '{twice[0]}' is named twice")
    return found


@dataclass(frozen=True)
class Trainee:
    """A model made to train by a configuration: call `model`, then `optimizer.step()`; `module` is the network itself.

    `state` has the records of our exchange, and is None for the peers and for modes that have none; `agreement` is
    None for the peers.
    """

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    state: CompressionState | None
    close: Callable[[], None]
    agreement: Agreement | None = None


def make_trainee(chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> Trainee:
    """Let `module` and `optimizer` train as `chosen` says, together with all ranks of `world`."""
    if chosen.kind == "single":
        return Trainee(module, module, optimizer, None, _nothing)
    if chosen.kind == "peer":
        return Trainee(PEERS[chosen.name].wrap(module), module, optimizer, None, _nothing)
    synchronous = chosen.consistency.startswith("sync")
    options = {"algorithm": chosen.algorithm} if synchronous and chosen.codec != "auto" else {}
    mode = distribute(module, optimizer, codec=chosen.codec, consistency=chosen.consistency, world=world, **options)
    state = mode.state if isinstance(mode, SyncAgreement) else None
    return Trainee(module, module, optimizer, state, mode.close, mode)


def _nothing() -> None:
    """Peers and single need no closing."""


def layers_of(chosen: Configuration, trainee: Trainee, sent_nbytes: float | None, world_size: int) -> list[Layer]:
    """What one worker sends of each parameter in a step.

    Buckets mix layers, so what was counted is divided among them by their payloads' sizes; for the peers, where
    `sent_nbytes` is None, the sizes themselves stand, times 2(P−1)/P as an all-reduce of the least bytes sends.
    """
    factor = 2 * (world_size - 1) / world_size
    forms = {form.name: form for form in trainee.state.layers} if trainee.state is not None else {}
    rows = []
    for name, parameter in trainee.module.named_parameters():
        shape, numel = list(parameter.shape), parameter.numel()
        if name in forms:
            kind, nbytes = forms[name].form, float(forms[name].sent_nbytes)
        else:
            kind, nbytes = _payload(chosen, trainee, name, parameter)
            nbytes *= factor
        rows.append(Layer(name, shape, numel, kind, 4.0 * numel * factor, nbytes))
    total = sum(row.sent_nbytes for row in rows)
    scale = 1.0 if sent_nbytes is None or total == 0 else sent_nbytes / total
    return [
        Layer(r.name, r.shape, r.numel, r.codec, r.raw_nbytes, r.sent_nbytes * scale) for r in rows
    ]


def _payload(chosen: Configuration, trainee: Trainee, name: str, parameter: nn.Parameter) -> tuple[str, float]:
    """By what codec a parameter's gradient goes, and into how many bytes."""
    if chosen.kind == "peer":
        return chosen.codec, PEERS[chosen.name].nbytes(list(parameter.shape))
    state = trainee.state
    exact = "none", 4.0 * parameter.numel()
    if state is None or state.exempt.covers(name, parameter) or chosen.codec == "none":
        return exact
    used = state.schedule.at(state.step) if state.auto is None else None
    if used is None or used.kind == "matrix":
        return (chosen.codec if used is None else "none"), exact[1]
    whole = max(1 << 16, parameter.numel())  # a header is shared by all layers of a message
    return chosen.codec, used.max_nbytes(whole) / whole * parameter.numel()
