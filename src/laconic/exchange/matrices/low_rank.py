"""PowerSGD on a bucket: all its matrices by their factors, in two messages a peer and round, with feedback.

Callers: the DDP hook, for codec "powersgd(r)". The method's steps are in `codecs/powersgd.py`; its rounds:

    M  = gradient + residual               per matrix (rows: the first dimension, columns: all others)
    P  = M Q₀                              first sum over ranks, all matrices and all exact parameters in one vector
    P̂  = orthogonalise(P)                  the same bits on every rank, since the sum is
    Q  = Mᵀ P̂                              second sum over ranks, all matrices in one vector
    gradient = P̂ (ΣQ / P)ᵀ                 the mean of the ranks' M, projected on P̂
    residual = M − P̂ Qᵀ                    what this rank's own M lost in the projection

Invariant: over all ranks, Σ gradient + Σ residual_after = Σ M but for rounding.

Source: Vogels et al., PowerSGD, NeurIPS 2019, Alg. 1 and 2.
Differs: the residual is what this rank's M lost, with its own Q, and not M minus the mean's reconstruction. Both have
the same sum over ranks, but the latter also keeps every rank's distance from the mean, which is never paid off.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.powersgd import PowerSGD
from laconic.errors import BadInput
from laconic.exchange.coded import Route
from laconic.exchange.job import LayerForm, wire_nbytes
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.matrices.base import ExactSum, MatrixBucket, MatrixMethod, register
from laconic.exchange.residuals import Residuals
from laconic.storage.tree import own_copy
from laconic.transports.base import Pausing, Timings


@register("powersgd")
class LowRank(MatrixMethod):
    """PowerSGD's last Q by parameter name, the same on every rank."""

    def __init__(self) -> None:
        self.warm: dict[str, Tensor] = {}

    def bucket(self, info: BucketInfo, residuals: Residuals) -> MatrixBucket:
        return LowRankBucket(info, residuals, self.warm)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: q.clone() for name, q in self.warm.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.warm.clear()
        self.warm.update({name: own_copy(q) for name, q in state.items()})


class LowRankBucket(MatrixBucket):
    """The state of one bucket that is exchanged by PowerSGD, kept from step to step.

    Exempt parameters, and matrices for which r·(rows + columns) floats are not fewer than rows·columns, are summed
    exactly, in the messages of P. `warm` is the last step's Q by parameter name, shared by all buckets.
    """

    def __init__(self, info: BucketInfo, residuals: Residuals, warm: dict[str, Tensor]) -> None:
        super().__init__(info, residuals)
        self.warm = warm
        self.feedback = residuals.feedback is not False
        self.codec: PowerSGD | None = None
        self._matrices: list[Entry] = []
        self._exact: list[Entry] = []
        self._sums = (ExactSum(), ExactSum())
        self._algorithms = ("direct", "direct")

    def use(self, chosen: Codec) -> None:
        """Switch to the codec `chosen`; keep residuals, and the last Q if its shape still fits."""
        if not isinstance(chosen, PowerSGD):
            raise BadInput(f"this bucket is exchanged by powersgd, not by {chosen}")
        if self.codec != chosen:
            self.codec = chosen
            self._matrices = [e for e in self.entries if not e.exempt and pays(chosen, e)]
            self._exact = [e for e in self.entries if e not in self._matrices]

    def steps(self, buffer: Tensor, route: Route) -> Pausing[tuple[Timings, str]]:
        assert self.codec is not None
        begun = time.perf_counter()
        inputs = self._inputs(buffer)
        starts = [self.codec.start(_shape(e), route.step, self._previous(e)) for e in self._matrices]
        projections = [self.codec.project(m, q) for m, q in zip(inputs, starts, strict=True)]
        first = torch.cat([buffer[e.start : e.stop] for e in self._exact] + [p.view(-1) for p in projections])
        second = torch.zeros(sum(q.numel() for q in starts))
        sums = [plan.planned(each, route) for plan, each in zip(self._sums, (first, second), strict=True)]
        self._algorithms = (sums[0].algorithm, sums[1].algorithm)
        detail = f"{self.codec} by {' and '.join(self._algorithms)}"
        count = len(sums[0].rounds) + len(sums[1].rounds)
        with route.transport.call("all_reduce", "powersgd", self.info.numel, "float32", detail, count) as call:
            timings = call.timings
            timings.encode_s += time.perf_counter() - begun
            yield from sums[0].steps_in(call, route.step)
            begun = time.perf_counter()
            size, at = route.transport.world_size, 0
            for e in self._exact:
                torch.div(first[at : at + e.stop - e.start], size, out=buffer[e.start : e.stop])
                at += e.stop - e.start
            # None where NaN or infinity came from some rank, which all ranks see in the sum
            bases = [
                self.codec.orthogonalise(p) if bool(torch.isfinite(p).all()) else None
                for p in _cut(first[at:], projections)
            ]
            own = self._own(inputs, bases, second)
            timings.encode_s += time.perf_counter() - begun
            if self._matrices:
                yield from sums[1].steps_in(call, route.step, len(sums[0].rounds))
                begun = time.perf_counter()
                self._rebuild(buffer, list(zip(inputs, bases, own, strict=True)), second.div_(size))
                timings.decode_s += time.perf_counter() - begun
        return timings, self._algorithms[0]

    def _inputs(self, buffer: Tensor) -> list[Tensor]:
        """M of every matrix: with feedback the residual itself, which has taken the gradient in; else the gradient."""
        for entry in self._exact:
            self.residuals.settle(entry.name, buffer[entry.start : entry.stop])
        inputs = []
        for entry in self._matrices:
            gradient = buffer[entry.start : entry.stop]
            if self.feedback:
                inputs.append(self.residuals.whole(entry.name, entry.numel).add_(gradient).view(_shape(entry)))
            else:
                inputs.append(self.residuals.settle(entry.name, gradient).view(_shape(entry)))
        return inputs

    def _previous(self, entry: Entry) -> Tensor | None:
        """The last step's Q of this matrix, unless it was for another matrix_rank."""
        assert self.codec is not None
        found = self.warm.get(entry.name)
        rows, columns = _shape(entry)
        return found if found is not None and found.shape == (columns, self.codec.columns((rows, columns))) else None

    def _own(self, inputs: list[Tensor], bases: list[Tensor | None], second: Tensor) -> list[Tensor]:
        """This rank's Q of every matrix, zeros where there is no P̂; also written to `second`, where they are summed."""
        assert self.codec is not None
        own = [
            torch.zeros(m.shape[1], self.codec.columns((m.shape[0], m.shape[1])))
            if p is None
            else self.codec.back(m, p)
            for m, p in zip(inputs, bases, strict=True)
        ]
        for part, q in zip(_cut(second, own), own, strict=True):
            part.copy_(q)
        return own

    def _rebuild(self, buffer: Tensor, factors: list[tuple[Tensor, Tensor | None, Tensor]], mean: Tensor) -> None:
        """The mean's reconstruction in `buffer`, and the residuals, from (M, P̂, Q) of every matrix and the mean Q."""
        means = _cut(mean, [q for _, _, q in factors])
        for entry, (m, p, q), mean_q in zip(self._matrices, factors, means, strict=True):
            gradient = buffer[entry.start : entry.stop].view(_shape(entry))
            if p is None or not bool(torch.isfinite(mean_q).all()):
                gradient.fill_(float("nan"))
                self.residuals.take(entry.name)
                self.warm.pop(entry.name, None)
                continue
            if self.feedback:
                m.addmm_(p, q.T, alpha=-1.0)
            torch.mm(p, mean_q.T, out=gradient)
            self.warm[entry.name] = mean_q.clone()

    def layers(self, world_size: int) -> list[LayerForm]:
        assert self.codec is not None
        forms = []
        for entry in self.entries:
            raw, form = wire_nbytes(entry.numel, world_size), "exact"
            sent = wire_nbytes(entry.numel, world_size, self._algorithms[0])
            if entry in self._matrices:
                rows, columns = _shape(entry)
                r, form = self.codec.columns((rows, columns)), str(self.codec)
                sent = wire_nbytes(r * rows, world_size, self._algorithms[0])
                sent += wire_nbytes(r * columns, world_size, self._algorithms[1])
            forms.append(LayerForm(entry.name, form, raw, sent))
        return forms


def pays(codec: PowerSGD, entry: Entry) -> bool:
    """Whether the factors of this parameter are fewer floats than itself."""
    return len(entry.shape) >= 2 and codec.floats_sent(_shape(entry)) < entry.stop - entry.start


def _shape(entry: Entry) -> tuple[int, int]:
    """The parameter as a matrix: its first dimension by all others."""
    rows = entry.shape[0]
    return rows, (entry.stop - entry.start) // rows


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat` as matrices of the shapes of `like`, one after the other: views."""
    parts = torch.split(flat, [m.numel() for m in like])
    return [part.view(m.shape) for part, m in zip(parts, like, strict=True)]
