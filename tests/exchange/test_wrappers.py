"""Wrappers around a channel: any of them compose, the outermost first, and all of them are in the job's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import laconic
from laconic.codecs import Codec
from laconic.codecs.plans import PlannedCodec
from laconic.exchange.buckets import BucketChannels, BucketExchange, BucketGroup
from laconic.exchange.coded import Route
from laconic.exchange.dgc import DeepGradientCompression, MomentumCorrection
from laconic.exchange.layout import BucketInfo, Entry, Parameters, exemptions
from laconic.exchange.options import Options
from laconic.exchange.ownership import owned
from laconic.exchange.residuals import Encoder, Residuals, Site
from laconic.transports.base import finish
from laconic.transports.threads import run_threads
from laconic.transports.world import World

INFO = BucketInfo((Entry("bias", 0, 4, True), Entry("weight", 4, 404, False)), 404)


@dataclass
class _Counting:
    inner: Encoder
    calls: list[str]
    name: str
    gathers: bool = False

    def carry(self, x: Tensor) -> Tensor:
        return self.inner.carry(x)

    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor:
        self.calls.append(f"{self.name} encodes")
        return self.inner.encode(codec, x, site, step=step, out=out, copies=copies)


class Times:
    """A wrapper of a user's own: gradients times a factor."""

    dense = False

    def __init__(self, key: str, factor: float, calls: list[str]) -> None:
        self.key, self.factor, self.calls = key, factor, calls

    def before(self, entries: Sequence[Entry], values: Tensor, world_size: int, *, exact: bool) -> None:
        self.calls.append(f"{self.key} before")
        values *= self.factor

    def wrap(self, inner: Encoder, codec: Codec, members: Sequence[Entry]) -> Encoder:
        return _Counting(inner, self.calls, self.key)

    def rescale(self, factor: float, loss_scale: float) -> None:
        """Nothing is kept."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"factor": torch.tensor([self.factor])}

    def check_state(self, state: Mapping[str, Any], numels: Mapping[str, int] | None = None) -> None:
        assert state.keys() <= {"factor"}

    def load_state_dict(self, state: Mapping[str, Tensor], *, resumed: bool = False) -> None:
        self.factor = float(state["factor"])


def test_wrappers_compose_the_outermost_first() -> None:
    calls: list[str] = []
    residuals = Residuals()
    bucket = BucketChannels(INFO, (Times("outer", 2.0, calls), Times("inner", 5.0, calls), residuals))
    bucket.use(laconic.codec("topk(0.5)"))
    gradients = torch.arange(404.0)
    buffer = gradients.clone()
    run_threads(1, lambda t: finish(BucketGroup([bucket]).steps([buffer], Route(t, "gather"))))
    assert calls == ["outer before", "inner before", "outer encodes", "inner encodes"]
    assert torch.equal(buffer[:4], 10 * gradients[:4]), "exempt values pass the wrappers and no codec"
    assert torch.equal(buffer[4:] + residuals.state_dict()["weight"], 10 * gradients[4:])


def test_what_wrappers_keep_is_the_state_of_the_exchange() -> None:
    def made(factor: float) -> tuple[BucketExchange, Times, MomentumCorrection]:
        times, momentum = Times("times", factor, []), MomentumCorrection(DeepGradientCompression(0.5))
        named = [("bias", torch.zeros(4)), ("weight", torch.zeros(400))]
        parameters = Parameters(named, exemptions(None))
        return BucketExchange(PlannedCodec("topk(0.5)"), parameters, Options(), (momentum, times)), times, momentum

    def work(transport: Any) -> None:
        one, _, momentum = made(3.0)
        other, times, velocities = made(1.0)
        one.world = other.world = World(transport)
        momentum.before(INFO.entries, torch.ones(404), 1)
        one.residuals.load_state_dict({"weight": torch.ones(400)})
        state = owned({"step": 7, **one.state_dict()}, 0, 1)
        assert state.keys() >= {"residuals", "velocity", "times"}
        other.check_state(state)
        other.load_state_dict(state)
        assert (other.step, times.factor) == (7, 3.0)
        assert velocities.velocities["weight"].eq(1).all()
        assert other.residuals.state_dict()["weight"].eq(1).all()

    run_threads(1, work)
