"""How a trial trains: a peer, one process alone, `laconic.compress` on DDP, `laconic.distribute` or `laconic.divide`.

Callers: the trainer, for each step, each checkpoint and the trial's figures. A strategy is a subclass of Trainee, found
by the configuration's kind. Another, `laconic.elastic`, has workers that come and go, and so a driver of its own
(`runs/elastic/`).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.codecs import Codec
from laconic.consistency.distribute import distribute
from laconic.consistency.modes.sync import SyncAgreement
from laconic.exchange.hook import compress
from laconic.exchange.job import BucketRecord
from laconic.exchange.options import Options
from laconic.exchange.state import CompressionState
from laconic.lab.records.record import Configuration, Layer
from laconic.parallel import Data, Plan
from laconic.parallel.divide import CONTEXT, divide
from laconic.parallel.state import load_whole, whole_state
from laconic.transports.world import World

KEPT = 512  # exchanges, for a timeline


class Times(NamedTuple):
    """When a step began, when its forward, its backward and its optimiser ended."""

    begun: float
    forward: float
    backward: float
    ended: float


class Parts(NamedTuple):
    """Where a step's seconds went, and what it sent, as far as that can be told."""

    compute: float
    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0
    sent: float = 0.0


class Trainee(ABC):
    """A model made to train by a configuration: call `model`, then backward, then `optimizer.step()`.

    Attributes:
        model: what is called.
        module: the network itself.
        counts: whether the strategy counts the bytes it sends.
        recent: the last exchanges that `parts` has taken.
    """

    counts: ClassVar[bool] = True

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        self.chosen, self.model, self.module, self.optimizer = chosen, module, module, optimizer
        self.recent: deque[BucketRecord] = deque(maxlen=KEPT)

    @abstractmethod
    def parts(self, times: Times) -> Parts:
        """The parts of the step that has just ended; called once a step."""

    @abstractmethod
    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        """By what codec a parameter's gradient goes, and how many bytes a worker sends for it."""

    def exchanged(self) -> list[BucketRecord]:
        """The exchanges of the last step that are on record and were not taken by `parts`; empty where none are."""
        return []

    def waits(self, times: Times) -> list[tuple[float, float]]:
        """From when to when the training waited for exchanges, in a step at least; empty where that is not known."""
        return []

    def layers_of(self, bucket: int) -> list[str]:
        """The names of the parameters in a bucket of gradients."""
        return []

    def staleness(self) -> list[int]:
        """Of the steps so far; empty where it is not measured."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside module and optimiser."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """The reverse of `state_dict`."""

    def settle(self) -> None:  # noqa: B027 - most train the module itself
        """Called by all workers before the module is tested, kept or compared: leave in it what was trained so far."""

    def finish(self) -> None:  # noqa: B027 - most leave the same model on all workers at every step
        """Called by all workers after the last step: leave in the module what was trained."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """End threads and sockets."""


def wire_factor(world_size: int) -> float:
    """How many times its size a worker sends of a gradient in an all-reduce of the least bytes: 2(P−1)/P."""
    return 2 * (world_size - 1) / world_size


def coded_nbytes(codec: Codec, numel: int) -> float:
    """The bytes of so many values in a long message: its header is shared by all layers."""
    whole = max(1 << 16, numel)
    return codec.max_nbytes(whole) / whole * numel


def layers(
    module: nn.Module, payload: Callable[[str, nn.Parameter], tuple[str, float]], world_size: int, sent: float | None
) -> list[Layer]:
    """What one worker sends of each parameter in a step.

    Buckets mix layers, so what was counted, `sent`, is divided among them by their payloads' sizes; where nothing was,
    the sizes themselves stand.
    """
    if world_size == 1:
        return []
    found = {name: payload(name, parameter) for name, parameter in module.named_parameters()}
    total = sum(nbytes for _, nbytes in found.values())
    scale = 1.0 if sent is None or total == 0 else sent / total
    factor = wire_factor(world_size)
    return [
        Layer(name, list(p.shape), p.numel(), found[name][0], 4.0 * p.numel() * factor, found[name][1] * scale)
        for name, p in module.named_parameters()
    ]


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


class PeerTrainee(Trainee):
    """A peer at work; its bytes are those of the formula."""

    counts: ClassVar[bool] = False

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, optimizer, world)
        self.model = PEERS[chosen.name].wrap(module)

    def parts(self, times: Times) -> Parts:
        """DDP's backward computes and communicates at once: what it takes cannot be told apart, and is left over."""
        return Parts(times.forward - times.begun + times.ended - times.backward)

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        peer = PEERS[self.chosen.name]
        return peer.codec, peer.nbytes(list(parameter.shape)) * wire_factor(self.chosen.workers)


class SingleTrainee(Trainee):
    """One process with the whole batch."""

    def parts(self, times: Times) -> Parts:
        return Parts(times.ended - times.begun)

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        return "none", 0.0


def options_of(chosen: Configuration) -> dict[str, Any]:
    """The options of the door: modes other than sync, and codec auto, choose the algorithm themselves."""
    fixed = chosen.consistency == "sync" and chosen.codec != "auto"
    known = {each.name for each in fields(Options)}  # a record has words for its reader beside them
    given = {name: value for name, value in chosen.options.items() if name in known}
    return {**({"algorithm": chosen.algorithm} if fixed else {}), **given}


def take_records(state: CompressionState, recent: deque[BucketRecord]) -> tuple[float, float, float, float]:
    """Seconds of encoding, waiting and decoding, and bytes sent, since they were last taken; they become `recent`."""
    encode = wait = decode = sent = 0.0
    while state.records:
        record = state.records.popleft()
        recent.append(record)
        encode, wait, decode = encode + record.encode_s, wait + record.wait_s, decode + record.decode_s
        sent += record.sent_nbytes
    return encode, wait, decode, sent


def last_records(state: CompressionState) -> list[BucketRecord]:
    """The records of the last step that has any."""
    return [record for record in state.records if record.step == state.records[-1].step]


def payload_of(
    state: CompressionState, chosen: Configuration, name: str, parameter: nn.Parameter
) -> tuple[str, float]:
    """By what codec a parameter's gradient goes, and how many bytes a worker sends for it."""
    for form in state.layers:  # of matrix codecs, which know what each parameter becomes
        if form.name == name:
            return form.form, float(form.sent_nbytes)
    codec, nbytes = "none", 4.0 * parameter.numel()
    used = state.choice.codec_for(0, state.step) if state.auto is None else None
    if not state.parameters.exempt.covers(name, parameter):
        if used is None:
            codec = chosen.codec
        elif used.kind != "matrix" and not used.exact:
            codec, nbytes = chosen.codec, coded_nbytes(used, parameter.numel())
    return codec, nbytes * wire_factor(chosen.workers)


class CompressTrainee(Trainee):
    """A DDP model with our hook."""

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, optimizer, world)
        self.model = wrapped = DistributedDataParallel(module)
        self._job = compress(wrapped, chosen.codec, world=world, **options_of(chosen))

    def parts(self, times: Times) -> Parts:
        """The exchange runs beside backward, on a thread of its own: what backward takes longer is left over."""
        encode, wait, decode, sent = take_records(self._job, self.recent)
        span, busy = times.backward - times.forward, encode + wait + decode
        share = min(1.0, span / busy) if busy else 1.0  # exchanges that overlap count the same second twice
        compute = times.forward - times.begun + times.ended - times.backward
        return Parts(compute, encode * share, wait * share, decode * share, sent)

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        return payload_of(self._job, self.chosen, name, parameter)

    def exchanged(self) -> list[BucketRecord]:
        return last_records(self._job)

    def waits(self, times: Times) -> list[tuple[float, float]]:
        """From the last gradient to the end of backward."""
        made = [record.made for record in self.recent if times.forward <= record.made <= times.backward]
        return [(max(made), times.backward)] if made else []

    def layers_of(self, bucket: int) -> list[str]:
        return self._job.parameters.names_in(bucket)

    def state_dict(self) -> dict[str, Any]:
        return self._job.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._job.load_state_dict(state)
        self._job.records.clear()

    def close(self) -> None:
        self._job.close()


class DistributeTrainee(Trainee):
    """A model whose optimiser trains together with the others."""

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, optimizer, world)
        self._job = distribute(module, optimizer, codec=chosen.codec, consistency=chosen.consistency, world=world,
                               **options_of(chosen))  # fmt: skip
        self._exchange = self._job.state if isinstance(self._job, SyncAgreement) else None

    def parts(self, times: Times) -> Parts:
        compute = times.backward - times.begun
        if self._exchange is not None:
            return Parts(compute, *take_records(self._exchange, self.recent))
        last = self._job.records[-1]
        return Parts(compute, wait=last.wait_s, sent=float(last.sent_nbytes))

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        if self._exchange is None:
            return "none", 4.0 * parameter.numel() * wire_factor(self.chosen.workers)
        return payload_of(self._exchange, self.chosen, name, parameter)

    def exchanged(self) -> list[BucketRecord]:
        return [] if self._exchange is None else last_records(self._exchange)

    def waits(self, times: Times) -> list[tuple[float, float]]:
        if isinstance(self._job, SyncAgreement) and self._job.stream is not None:
            return list(self._job.stream.waits)
        ended = [r.begun + r.seconds for r in self.recent if times.backward <= r.begun <= times.ended]
        return [(times.backward, max(ended))] if ended else []

    def layers_of(self, bucket: int) -> list[str]:
        return [] if self._exchange is None else self._exchange.parameters.names_in(bucket)

    def staleness(self) -> list[int]:
        return [record.staleness for record in self._job.records if record.staleness is not None]

    def finish(self) -> None:
        self._job.finish()

    def close(self) -> None:
        self._job.close()


class DivideTrainee(Trainee):
    """A model divided over all workers, each with rows of its own; `module` is a whole copy, made when it is needed."""

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, optimizer, world)
        plan = Plan.of(chosen.options["division"])
        if not any(isinstance(form, Data) for _, form in plan.entries):
            plan = Plan((*plan.entries, ("", Data(ask=True))))
        own = vars(module).pop("forward", None)  # of the warm-up, whose model has no data
        self.model = copy.deepcopy(module)
        if own is not None:
            module.forward, self.model.forward = own, partial(own.func, self.model)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        divide(self.model, plan, codec=chosen.codec.partition(" → ")[0], world=world)
        parts = dict(self.model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [parts[names[id(parameter)]] for parameter in group["params"]]
        self._traffic, self._before = getattr(self.model, CONTEXT).traffic, (0, 0.0)

    def parts(self, times: Times) -> Parts:
        now = (self._traffic.total_nbytes, sum(self._traffic.wait_s.values()))
        (sent, wait), self._before = (now[0] - self._before[0], now[1] - self._before[1]), now
        return Parts(times.ended - times.begun - wait, wait=wait, sent=float(sent))

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        """What crosses at a parameter's layer is told beside its first parameter, which is its weight."""
        layer, _, own = name.rpartition(".")
        if not any(cut == layer for cut, _ in self._traffic.sent_nbytes):
            return "none", 4.0 * parameter.numel() * wire_factor(self.chosen.workers)
        cuts = (layer, f"{layer} weights") if own == "weight" else ()
        sent = sum(self._traffic.sent_nbytes[cut, way] for cut in cuts for way in ("forward", "backward"))
        return self.chosen.codec, float(sent)

    def settle(self) -> None:
        self.module.load_state_dict(whole_state(self.model))

    finish = settle

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_whole(self.model, self.module.state_dict())


STRATEGIES: dict[str, Callable[[Configuration, nn.Module, Optimizer, World], Trainee]] = {
    "compress": CompressTrainee,
    "distribute": DistributeTrainee,
    "divide": DivideTrainee,
    "peer": PeerTrainee,
    "single": SingleTrainee,
}


def make_trainee(chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> Trainee:
    """Let `module` and `optimizer` train as `chosen` says, together with all ranks of `world`."""
    return STRATEGIES[chosen.kind](chosen, module, optimizer, world)
