"""Sufficient factors on a bucket: fully connected layers send (o, δ) to all, everything else is summed exactly.

Callers: the DDP hook, for codec "factors". Every rank sends the factors of all ranks' layers to all others, one message
a peer, and computes W's gradient as one product over all ranks' rows, (1/P)·Σ δᵀ o, and the bias's as the mean of Σ δ.

Ranks agree on these layers without extra messages: at every step each rank reports how many rows it could send for
each layer, and the sum decides the next step by `Factors.pays`. Before sending, a rank checks that its factors give the
gradient that DDP holds: both are multiplied by a random vector of signs (Freivalds). They do not when
the weight is also used elsewhere, has a penalty in the loss, or was not zeroed. Such a rank sends its gradient instead;
so no condition on the model or the loop need be known here, and the result is that of DDP to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.codecs.casts import NoneCodec
from laconic.codecs.factors import Factors
from laconic.errors import BadInput
from laconic.exchange.coded import Route, max_nbytes, pack, unpack
from laconic.exchange.costs import GUESS, rides_along
from laconic.exchange.job import LayerForm, wire_nbytes
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.matrices.base import ExactSum, MatrixBucket, MatrixMethod, register
from laconic.exchange.matrices.linear_watch import Linear, LinearWatch
from laconic.exchange.residuals import Residuals
from laconic.transports.base import Call, Incoming, Outgoing, Pausing, Timings, drive

_EXACT = NoneCodec()
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class _Layer:
    """A watched layer whose weight lies in this bucket; `bias` only where it lies here too."""

    linear: Linear
    weight: Entry
    bias: Entry | None

    @property
    def numel(self) -> int:
        return self.weight.stop - self.weight.start + (self.linear.c_out if self.bias else 0)

    def gradients(self, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight's part of the bucket as a matrix, and the bias's."""
        weight = buffer[self.weight.start : self.weight.stop].view(self.linear.c_out, self.linear.c_in)
        return weight, None if self.bias is None else buffer[self.bias.start : self.bias.stop]


@register("factors")
class SufficientFactors(MatrixMethod):
    """The weights that go as factors at the next step, the same on every rank, and the captured factors."""

    def __init__(self) -> None:
        self.agreed: set[str] = set()
        self.watch: LinearWatch | None = None

    def bucket(self, info: BucketInfo, residuals: Residuals) -> MatrixBucket:
        return FactorsBucket(info, residuals, self.watch, self.agreed)

    def observe(self, model: nn.Module, names: Mapping[int, str]) -> None:
        """Capture the factors of this model's fully connected layers from now on."""
        self.close()
        self.watch = LinearWatch(model, names)

    def end_of_step(self) -> None:
        """Release factors that were captured but not used."""
        if self.watch is not None:
            self.watch.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """A one for each of the weights that go by factors next."""
        return {name: torch.ones(1) for name in sorted(self.agreed)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.agreed.clear()
        self.agreed.update(state)

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None


class FactorsBucket(MatrixBucket):
    """The state of one bucket whose fully connected layers may go by factors.

    Args:
        residuals: of earlier codecs, sent exactly at the next step.
        watch: captures the layers' factors; None sends all exactly.
        agreed: the layers that go by factors at the next step, shared by all buckets; the same on every rank.
    """

    def __init__(
        self, info: BucketInfo, residuals: Residuals, watch: LinearWatch | None, agreed: set[str]
    ) -> None:
        super().__init__(info, residuals)
        self.watch = watch
        self.agreed = agreed
        self.codec = Factors()
        by_name = {e.name: e for e in self.entries}
        known = {} if watch is None else watch.layers
        self._layers = [
            _Layer(known[e.name], e, by_name.get(known[e.name].bias or ""))
            for e in self.entries
            if e.name in known and not e.exempt
        ]
        self._sum = ExactSum()
        self._memory: dict[int, Tensor] = {}
        self._forms: dict[str, tuple[str, int]] = {}
        self._signs = torch.Generator().manual_seed(0)

    def use(self, chosen: Codec) -> None:
        if chosen != self.codec:
            raise BadInput(f"this bucket is exchanged by factors, not by {chosen}")

    def steps(self, buffer: Tensor, route: Route) -> Pausing[tuple[Timings, str]]:
        world_size = route.transport.world_size
        begun = time.perf_counter()
        for entry in self.entries:
            self.residuals.settle(entry.name, buffer[entry.start : entry.stop])
        caught = [self._usable(layer, buffer) for layer in self._layers]
        chosen = [i for i, layer in enumerate(self._layers) if layer.weight.name in self.agreed]
        layers = [self._layers[i] for i in chosen]
        covered = {e.name for layer in layers for e in (layer.weight, layer.bias) if e is not None}
        rest = [e for e in self.entries if e.name not in covered]
        votes = [v for pair in caught for v in ((0, 0) if pair is None else (pair[0].shape[0], 1))]
        exact = torch.cat([*(buffer[e.start : e.stop] for e in rest), torch.tensor(votes, dtype=torch.float32)])
        payloads = [_payload(layer, caught[i], buffer) for i, layer in zip(chosen, layers, strict=True)]
        self._note(layers, payloads, rest, world_size)
        together = bool(layers) and rides_along(exact.numel(), world_size, route.link or GUESS)
        plan = None if together else self._sum.planned(exact, route)
        names = " ".join(layer.weight.name for layer in layers)
        count = bool(layers) + (0 if plan is None else len(plan.rounds))
        with route.transport.call("all_reduce", "factors", self.info.numel, "float32", names, count) as call:
            call.timings.encode_s += time.perf_counter() - begun
            if layers:
                sent = [*payloads, _EXACT.encode(exact)] if together else payloads
                sums = [_Sum(layer, buffer) for layer in layers]
                yield from self._gather(call, sums, exact.zero_() if together else None, sent)
            if plan is not None:
                yield from plan.steps_in(call, route.step, bool(layers))
        begun = time.perf_counter()
        at = 0
        for entry in rest:
            buffer[entry.start : entry.stop] = exact[at : at + entry.numel]
            at += entry.numel
        self._agree(exact[at:].tolist(), world_size)
        buffer.div_(world_size)
        call.timings.decode_s += time.perf_counter() - begun
        return call.timings, "gather" if plan is None else plan.algorithm

    def _usable(self, layer: _Layer, buffer: Tensor) -> tuple[Tensor, Tensor] | None:
        """A layer's captured factors, if they give the bucket's gradients up to rounding, tested by random signs."""
        pair = None if self.watch is None else self.watch.take(layer.weight.name)
        if pair is None:
            return None
        (o, delta), (weight, bias) = pair, layer.gradients(buffer)
        signs = torch.randint(0, 2, (o.shape[1],), generator=self._signs).mul_(2).sub_(1).float()
        right = _equal(weight @ signs, delta.T @ (o @ signs), delta.abs().T @ o.abs().sum(dim=1))
        if bias is not None:
            right = right and _equal(bias, delta.sum(dim=0), delta.abs().sum(dim=0))
        return pair if right else None

    def _gather(
        self, call: Call, sums: list[_Sum], exact: Tensor | None, payloads: list[Tensor]
    ) -> Pausing[None]:
        """One round: the payloads to every peer; the sums of all ranks' in order of rank, the same bits everywhere.

        No schedule: payloads of other ranks are as long as their batches, and are added in order of rank.
        `exact` is the exact rest where it travels along.
        """
        rank, size = call.transport.rank, call.transport.world_size
        message = pack(payloads)
        most = [_EXACT.max_nbytes(each.layer.numel) for each in sums]
        room = max_nbytes(most if exact is None else [*most, payloads[-1].numel()])

        def add(data: Tensor) -> int:
            found, nbytes = unpack(data, len(payloads))
            for each, payload in zip(sums, found, strict=False):
                each.add(payload)
            if exact is not None:
                _EXACT.decode_add(found[-1], exact)
            return nbytes

        def take(index: int, data: Tensor) -> int:
            if index == rank:
                add(message)
            return add(data)

        recvs = [self._incoming(peer, room) for peer in range(size) if peer != rank]
        sends = [Outgoing((rank + hop) % size, message) for hop in range(1, size)]
        yield from drive(call, 0, sends, recvs, take)
        begun = time.perf_counter()
        if rank == size - 1:
            add(message)
        for each in sums:
            each.finish()
        call.timings.decode_s += time.perf_counter() - begun

    def _incoming(self, peer: int, most: int) -> Incoming:
        """Memory of this bucket's own, since other exchanges may be under way meanwhile; it grows with the batch."""
        memory = self._memory.get(peer)
        if memory is None or memory.numel() < most:
            memory = self._memory[peer] = torch.empty(most, dtype=torch.uint8)
        return Incoming(peer, most, torch.uint8, memory.device, into=memory[:most], at_most=True)

    def _agree(self, votes: list[float], world_size: int) -> None:
        """From every rank's rows: which layers go by factors next time."""
        for layer, rows, able in zip(self._layers, votes[::2], votes[1::2], strict=True):
            c_in, c_out, name = layer.linear.c_in, layer.linear.c_out, layer.weight.name
            batch = -(-int(rows) // world_size) if able == world_size else 0
            if batch and Factors().pays(batch, c_in, c_out, world_size):
                self.agreed.add(name)
            else:
                self.agreed.discard(name)

    def _note(self, layers: list[_Layer], payloads: list[Tensor], rest: list[Entry], world_size: int) -> None:
        """Record what `layers()` returns."""
        self._forms = {e.name: ("exact", wire_nbytes(e.numel, world_size)) for e in rest}
        for layer, payload in zip(layers, payloads, strict=True):
            dense = payload.numel() == _EXACT.max_nbytes(layer.numel)
            nbytes = payload.numel() * (world_size - 1)
            self._forms[layer.weight.name] = ("gathered exact" if dense else "factors", nbytes)
            if layer.bias is not None:
                self._forms[layer.bias.name] = ("with weight", 0)

    def layers(self, world_size: int) -> list[LayerForm]:
        forms = []
        for entry in self.entries:
            raw = wire_nbytes(entry.numel, world_size)
            form, sent = self._forms.get(entry.name, ("exact", raw))
            forms.append(LayerForm(entry.name, form, raw, sent))
        return forms


class _Sum:
    """The sum of one layer's payloads: dense ones as they come, factors in one product at the end."""

    def __init__(self, layer: _Layer, buffer: Tensor) -> None:
        self.layer = layer
        self.weight, self.bias = layer.gradients(buffer)
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.weight.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def add(self, payload: Tensor) -> None:
        if payload.numel() < _EXACT.max_nbytes(self.layer.numel):  # factors are sent only when they are smaller
            shape = (self.layer.linear.c_out, self.layer.linear.c_in)
            self.pairs.append(Factors().unpack(payload, shape))
            return
        dense = _EXACT.decode(payload, self.layer.numel)
        self.weight += dense[: self.weight.numel()].view_as(self.weight)
        if self.bias is not None:
            self.bias += dense[self.weight.numel() :]

    def finish(self) -> None:
        if self.pairs:  # into memory of their own, so that the product's bits do not hang on where messages lay
            o, delta = (torch.cat(rows) for rows in zip(*self.pairs, strict=True))
            self.weight.addmm_(delta.T, o)
            if self.bias is not None:
                self.bias += delta.sum(dim=0)


def _payload(layer: _Layer, pair: tuple[Tensor, Tensor] | None, buffer: Tensor) -> Tensor:
    """A layer's factors, or its gradients where there are none to send."""
    if pair is not None:
        return Factors().pack(*pair)
    weight, bias = layer.gradients(buffer)
    return _EXACT.encode(torch.cat([weight.view(-1)] if bias is None else [weight.view(-1), bias]))


def _equal(one: Tensor, other: Tensor, sizes: Tensor) -> bool:
    """Whether two ways to add up the same numbers, whose absolute values add up to `sizes`, agree to rounding.

    Up to 2.2 ε·sizes were measured for one sum, and 0.8 for the norm of all, over inputs of five kinds from 4 × 48 to
    512 × 2048 (normal, positive, from a ReLU, fifth powers of normal, samples of scales 10⁻⁶ to 10³).
    """
    apart, most = (one - other).abs(), _EPS * sizes
    if not bool(torch.isfinite(most).all()):
        return False
    return bool((apart <= 8 * most).all()) and bool(apart.norm() <= 2 * most.norm())
