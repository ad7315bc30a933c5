"""How a trial trains: a peer, one process alone, `laconic.compress` on DDP, `laconic.distribute` or `laconic.divide`.

Callers: the trainer. A strategy is a subclass of Trainee (`trainee.py`), found by the configuration's kind; those that
divide the model are in `divided.py`. Another, `laconic.elastic`, has workers that come and go, and so a driver of its
own (`runs/elastic/`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.codecs.plans import CodecPlan
from laconic.consistency.distribute import distribute
from laconic.consistency.modes.sync import SyncAgreement
from laconic.exchange.hook import compress
from laconic.exchange.job import BucketRecord
from laconic.exchange.options import Options, sparsity_warm_up
from laconic.exchange.state import CompressionState
from laconic.transports.world import World
from laconic_lab.records.record import Configuration, NoiseRecord
from laconic_lab.runs.divided import divided_trainee
from laconic_lab.runs.trainee import Parts, Times, Trainee, coded_nbytes, wire_factor

WARM_UP = "warm_up"  # an option of configurations beside those of the doors

# torch's default rank; its 1000 steps of plain float32 are left out, or short runs would not compress at all
POWERSGD = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}


@dataclass(frozen=True)
class PeerStrategy:
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
    "ddp": PeerStrategy("none", DistributedDataParallel, lambda shape: 4.0 * math.prod(shape), {}),
    "ddp-fp16": PeerStrategy("fp16", _fp16, lambda shape: 2.0 * math.prod(shape), {}),
    "ddp-powersgd": PeerStrategy("powersgd", _powersgd, _powersgd_nbytes, POWERSGD),
}


class PeerTrainee(Trainee):
    """A peer at work; its bytes are those of the formula."""

    counts: ClassVar[bool] = False

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, optimizer, world)
        self.model = PEERS[chosen.name].wrap(module)

    def parts(self, times: Times) -> Parts:
        """DDP's backward computes and communicates at once: the two cannot be told apart, and count as other."""
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


def codec_plan(chosen: Configuration) -> CodecPlan:
    """The configuration's codec, or the plan of its warm-up: `warm_up` steps with each larger share of the values."""
    if WARM_UP not in chosen.options:
        return chosen.codec
    return dict(sparsity_warm_up(chosen.codec, steps_per_epoch=chosen.options[WARM_UP]))


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
    codec, nbytes, buckets = "none", 4.0 * parameter.numel(), state.buckets
    used = buckets.choice.codec_for(buckets.parameters.bucket_of(name), state.step) if state.auto is None else None
    if not buckets.parameters.exempt.covers(name, parameter):
        if used is None:
            codec = chosen.codec
        elif used.kind != "matrix" and not used.exact:
            codec = chosen.codec if buckets.noise is None else str(used)
            nbytes = coded_nbytes(used, parameter.numel())
    return codec, nbytes * wire_factor(chosen.workers)


def noise_of(state: CompressionState) -> NoiseRecord | None:
    """What quality "noise" found and chose, if that is the choice and it has been made."""
    noise = state.buckets.noise
    return NoiseRecord(noise.budget, noise.reviews, noise.by_layer()) if noise is not None and noise.reviews else None


class CompressTrainee(Trainee):
    """A DDP model with our hook."""

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, optimizer, world)
        self.model = wrapped = DistributedDataParallel(module)
        job = compress(wrapped, codec_plan(chosen), world=world, **options_of(chosen))
        assert isinstance(job, CompressionState)  # what a DDP model gets
        self._job = job

    def parts(self, times: Times) -> Parts:
        """The exchange runs during backward, on its own thread: backward's extra time counts as other."""
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
        return self._job.buckets.parameters.names_in(bucket)

    def noise(self) -> NoiseRecord | None:
        return noise_of(self._job)

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
        self._job = distribute(module, optimizer, codec=codec_plan(chosen), consistency=chosen.consistency, world=world,
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
        if isinstance(self._job, SyncAgreement) and self._job.sink is not None:
            return list(self._job.sink.waits)
        ended = [r.begun + r.seconds for r in self.recent if times.backward <= r.begun <= times.ended]
        return [(times.backward, max(ended))] if ended else []

    def layers_of(self, bucket: int) -> list[str]:
        return [] if self._exchange is None else self._exchange.buckets.parameters.names_in(bucket)

    def staleness(self) -> list[int]:
        return [record.staleness for record in self._job.records if record.staleness is not None]

    def noise(self) -> NoiseRecord | None:
        return None if self._exchange is None else noise_of(self._exchange)

    def catch_up(self) -> None:
        if isinstance(self._job, SyncAgreement):
            self._job.settle_weights()

    def finish(self) -> None:
        self._job.finish()

    def close(self) -> None:
        self._job.close()


STRATEGIES: dict[str, Callable[[Configuration, nn.Module, Optimizer, World], Trainee]] = {
    "compress": CompressTrainee,
    "distribute": DistributeTrainee,
    "divide": divided_trainee,
    "peer": PeerTrainee,
    "single": SingleTrainee,
}


def make_trainee(chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> Trainee:
    """Set up `module` and `optimizer` to train by `chosen`, together with all ranks of `world`."""
    return STRATEGIES[chosen.kind](chosen, module, optimizer, world)
