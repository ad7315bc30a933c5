"""The interface of matrix codecs, and their registry.

Callers: `buckets.py`. DDP rebuilds its buckets after the first step, so lasting state is kept by parameter name in a
MatrixMethod, one per model and codec, which makes the buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codecs import Codec, codec
from laconic.exchange.coded import Channel, CodedExchange, Route, sizes
from laconic.exchange.costs import GUESS, cheapest_coded
from laconic.exchange.job import LayerForm
from laconic.exchange.layout import BucketInfo
from laconic.exchange.residuals import Residuals
from laconic.registry import Registry
from laconic.storage.form import check_like, check_named
from laconic.transports.base import Pausing, Timings


class ExactSum:
    """Sums float32 vectors over all ranks; keeps plan and memory while length and route stay the same."""

    def __init__(self) -> None:
        self._channel = Channel(torch.empty(0), codec("none"))
        self._key: object = None
        self._exchange: CodedExchange | None = None

    def planned(self, values: Tensor, route: Route) -> CodedExchange:
        """The exchange that sums `values` in place, the same bits on every rank."""
        self._channel.buffer = values
        name = route.algorithm
        if name == "auto":
            name = cheapest_coded(sizes([self._channel]), route.transport.world_size, route.link or GUESS)
        key = (values.numel(), id(route.transport), name, route.hosts)
        if self._exchange is None or self._key != key:
            self._key = key
            self._exchange = CodedExchange([self._channel], route.transport, algorithm=name, hosts=route.hosts)
        return self._exchange


class MatrixBucket(ABC):
    """One bucket that is exchanged by a matrix codec, kept from step to step."""

    codec: Codec | None

    def __init__(self, info: BucketInfo, residuals: Residuals) -> None:
        self.info, self.entries, self.residuals = info, info.entries, residuals

    @abstractmethod
    def use(self, chosen: Codec) -> None:
        """Switch to the codec `chosen`. Raises BadInput for a codec of another name."""

    @abstractmethod
    def steps(self, buffer: Tensor, route: Route) -> Pausing[tuple[Timings, str]]:
        """Average `buffer` over all ranks, in place, in one call, pausing where there is nothing to do but wait.

        Returns:
            Where the time went, and the algorithm that was used.
        """

    @abstractmethod
    def layers(self, world_size: int) -> list[LayerForm]:
        """How each parameter went at the last step, and what this rank sent for it."""


class MatrixMethod(ABC):
    """A matrix codec's state for one model, and the maker of its buckets."""

    @abstractmethod
    def bucket(self, info: BucketInfo, residuals: Residuals) -> MatrixBucket:
        """A new bucket of these parameters."""

    def observe(self, model: nn.Module, names: Mapping[int, str]) -> None:  # noqa: B027
        """Watch the model, if gradients are not enough; `names` maps parameter ids to names."""

    def end_of_step(self) -> None:  # noqa: B027
        """Release the data of one step."""

    def state_dict(self) -> dict[str, Tensor]:
        """The lasting state, by parameter name; the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Load a state in place, since buckets share it."""

    def close(self) -> None:  # noqa: B027
        """Release the model."""


_METHODS: Registry[type[MatrixMethod]] = Registry("matrix codec", "laconic.exchange.matrices")
register = _METHODS.register


class Matrices:
    """The matrix codecs of one model, made as they are first needed.

    Attributes:
        methods: those in use, by the codec's name.
    """

    def __init__(self) -> None:
        self.methods: dict[str, MatrixMethod] = {}

    def of(self, name: str) -> MatrixMethod:
        """The method of the codec of this name."""
        if name not in self.methods:
            self.methods[name] = _METHODS.get(name)()
        return self.methods[name]

    @staticmethod
    def names() -> list[str]:
        """The codecs that are known."""
        return _METHODS.names()

    def end_of_step(self) -> None:
        for method in self.methods.values():
            method.end_of_step()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Each codec's state, by its name."""
        return {name: kept for name, method in self.methods.items() if (kept := method.state_dict())}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not of known codecs, with matrices by parameter name."""
        check_like(state, {}, "the state of the matrix codecs")
        for name, kept in state.items():
            _METHODS.get(name)
            check_named(kept, None, f"warm.{name}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; reset codecs that it does not name."""
        for name in {*state, *self.methods}:
            self.of(name).load_state_dict(state.get(name, {}))

    def close(self) -> None:
        for method in self.methods.values():
            method.close()
