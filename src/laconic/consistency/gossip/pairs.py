"""Asynchronous gossip: workers average in pairs, each in its own time, and nobody waits for a slow one.

Caller: `gossip(asynchronous=true)`. A worker's thread owns a mesh beside the world. After a step it asks one
acquaintance, which answers at once with where it was and moves by ½γ(x̂ᵢ − x̂ⱼ); with the answer the asker moves by as
much the other way. So the sum over all workers never changes, whatever happened to both meanwhile. A thread never waits
for an answer: it goes on answering others, so no circle of askers can lock up.

The thread works on a published copy of the weights; what it adds up reaches the model between steps, so a gradient is
always that of one set of weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Setup
from laconic.consistency.side import open_mesh
from laconic.errors import BadInput, CollectiveTimeout, NonFiniteError, PeerLost
from laconic.exchange.collectives import barrier
from laconic.exchange.message import max_nbytes, pack, unpack
from laconic.exchange.options import flat_codec
from laconic.storage.form import check_like
from laconic.transports.zeromq import ZmqTransport

EVERYONE = -1  # the key of the copy that all neighbours share where each is told the same at every step
_SAMPLE = 4096  # values that a codec's error is measured with


class Edges:
    """One worker's copies: of itself as each neighbour knows it, and of each neighbour; all begin with `start`.

    Both ends of an edge i → j keep the same copy x̂ᵢⱼ of what j knows of i. To tell j where it is, i sends C(xᵢ − x̂ᵢⱼ),
    and both add what that decodes to: what a codec leaves out stays in the difference and goes with the next message,
    so nothing else has to be remembered. Without a codec x itself is sent and nothing is kept.
    """

    def __init__(self, start: Tensor) -> None:
        self.start = start.clone()
        self.told: dict[int, Tensor] = {}
        self.heard: dict[int, Tensor] = {}

    def tell(self, key: int, x: Tensor, coder: Codec, draws: int) -> tuple[Tensor, Tensor]:
        """The message that tells `key` of x, and what it then knows. Without a codec that is x, not a copy."""
        if coder.exact:
            return pack([x.view(torch.uint8)]), x
        known = self.told.setdefault(key, self.start.clone())
        try:
            payload: Tensor | None = coder.encode(x - known, step=draws)
        except NonFiniteError:
            payload = None
        _add(known, payload, coder)
        return pack([payload]), known

    def hear(self, peer: int, message: Tensor, coder: Codec) -> Tensor:
        """What `peer` is known to be at, after its message; PayloadError when that is not one of `tell`."""
        (payload,), _ = unpack(message, 1)
        if coder.exact and payload is not None:
            return payload.view(torch.float32)
        known = self.heard.setdefault(peer, self.start.clone())
        _add(known, payload, coder)
        return known

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start.clone(),
            "told": {str(key): value.clone() for key, value in self.told.items()},
            "heard": {str(key): value.clone() for key, value in self.heard.items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        what = "the state of gossip"
        check_like(state, {"start": self.start, "told": {}, "heard": {}}, what)
        for kind in ("told", "heard"):
            check_like(state[kind], dict.fromkeys(state[kind], self.start), what)
            if strange := [key for key in state[kind] if not str(key).removeprefix("-").isdigit()]:
                raise BadInput(f"{what} does not fit: '{kind}.{strange[0]}' is not a rank's")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = state["start"].clone()
        self.told = {int(key): value.clone() for key, value in state["told"].items()}
        self.heard = {int(key): value.clone() for key, value in state["heard"].items()}


def message_nbytes(coder: Codec, numel: int) -> int:
    """The most a message of `tell` can take."""
    return max_nbytes([4 * numel if coder.exact else coder.max_nbytes(numel)])


def _add(known: Tensor, payload: Tensor | None, coder: Codec) -> None:
    """Both ends do this, with the same bits; NaN travels as it would without a codec."""
    if payload is None:
        known.fill_(float("nan"))
    elif coder.unbiased:
        known.add_(coder.decode(payload, known.numel()), alpha=share_kept(coder))
    else:
        coder.decode_add(payload, known)


def trust(coder: Codec) -> float:
    """γ unless the user says otherwise: δ² of `share_kept`.

    Measured on 4 workers with 256 Gaussian values through topk(0.1), δ² left 10 to 10⁵ times less distance after 120
    steps than δ did, depending on the graph; through 8-bit codecs δ and δ² are 1.
    """
    return share_kept(coder) ** 2


_kept: dict[str, float] = {}


def share_kept(coder: Codec) -> float:
    """The share δ of a Gaussian vector's energy that the codec keeps.

    1 − ‖x − C(x)‖² / ‖x‖² for biased codecs; 1/(1 + ‖x − C(x)‖²/‖x‖²) for unbiased ones, whose values are multiplied by
    it, as only so their error is smaller than their input.

    >>> from laconic.codecs import codec
    >>> [round(share_kept(codec(spec)), 1) for spec in ("none", "dynamic8", "onebit", "topk(0.1)")]
    [1.0, 1.0, 0.6, 0.5]
    """
    if str(coder) not in _kept:
        x = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))
        error = float((x - coder.decode(coder.encode(x), _SAMPLE)).square().sum() / x.square().sum())
        _kept[str(coder)] = 1 / (1 + error) if coder.unbiased else max(1 - error, 1e-3)
    return _kept[str(coder)]


ASK, ANSWER = 1, 2


class PairsAgreement(OwnWeights):
    """Asynchronous gossip at work: `Gossip` says what it does.

    A checkpoint holds no copies of what neighbours know: after a restart they begin anew, alike at both ends.
    """

    def __init__(self, setup: Setup, friends: list[int], gamma: float | None, seed: int) -> None:
        assert isinstance(setup.codec, str | Codec)  # a plan by steps has no meaning: workers are at different ones
        coder, world = flat_codec(setup.codec), setup.world
        super().__init__(setup)
        gamma = trust(coder) if gamma is None else gamma
        self.pairs: _Pairs | None = None
        if not self.alone:
            self.pairs = _Pairs(open_mesh(world), self.weights.values, coder, gamma, friends, seed)
            self.resources.callback(self.pairs.close)

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + (self.pairs.sent_nbytes if self.pairs else 0)

    def before_step(self) -> None:
        self._met = 0
        if self.pairs is not None:
            with self.agreeing():
                self._met = self.pairs.merge(self.weights.values)

    def after_step(self) -> None:
        if self.pairs is not None:
            with self.agreeing():
                self.pairs.merge(self.weights.values)
                self.pairs.wants = True
        self.settle(staleness=self._met)

    def finish(self) -> None:
        """The exact mean of all workers' weights and buffers, once all have come to the end."""
        if self.pairs is None:
            return
        with self.agreeing():
            begun = time.perf_counter()
            self.pairs.merge(self.weights.values)  # whoever came here without a step can be asked now
            self.pairs.rest(self.world.transport.timeout_s)
            barrier(group=self.world)  # from here on nobody asks
            self.waited(time.perf_counter() - begun)
            self.pairs.merge(self.weights.values)
        self.average_all()
        self.pairs.merge(self.weights.values)


class _Pairs:
    """The thread that asks and answers."""

    def __init__(
        self, mesh: ZmqTransport, values: Tensor, coder: Codec, gamma: float, friends: list[int], seed: int
    ) -> None:
        self.mesh, self.coder, self.pull = mesh, coder, 0.5 * gamma
        self.friends, self.draw = friends, np.random.Generator(np.random.Philox(key=[seed, mesh.rank]))
        self.edges = Edges(values)
        self.wants = False  # the next acquaintance is to be asked
        self.sent_nbytes = 0
        self._published = values.clone()  # where the model was at its last step
        self._known = False
        self._gained = torch.zeros_like(values)  # what pairs have added since
        self._met = 0
        self._draws = mesh.rank
        self._asked: tuple[int, Tensor] | None = None  # whom, and what it was told
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laconic-gossip", daemon=True)
        self._thread.start()

    def merge(self, values: Tensor) -> int:
        """Put what pairs have added into the model and publish it; returns how many pairs these were."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            values.add_(self._gained)
            self._gained.zero_()
            self._published.copy_(values)
            self._known = True
            met, self._met = self._met, 0
        return met

    def rest(self, timeout_s: float) -> None:
        """Wait until the last question is asked and answered."""
        deadline = time.monotonic() + timeout_s
        while (self.wants or self._asked is not None) and self._failure is None:
            if time.monotonic() > deadline:
                peer = None if self._asked is None else self._asked[0]
                text = f"{self.mesh.where()} gossip: no answer from rank {peer} in {timeout_s:g} s"
                raise CollectiveTimeout(text, rank=self.mesh.rank, peer=peer)
            time.sleep(0.001)

    def close(self) -> None:
        """End the thread and the mesh."""
        self._stop.set()
        self._thread.join()
        self.mesh.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._asked is not None and self._asked[0] not in self.mesh.peers:
                    self._asked = None  # it died; what it was told is lost with it
                if self.wants and self._asked is None:
                    self._ask()
                self._serve()
        except Exception as error:  # raised in the next step
            self._failure = error

    def _serve(self) -> None:
        """Take in one message, waiting a tick at most, and answer it."""
        if not self._known:  # a checkpoint may have changed the model since it was installed
            self._stop.wait(0.001)
            return
        try:
            peer, tag, message = self.mesh.recv_any(timeout_s=1e-4)
        except CollectiveTimeout:
            return
        except PeerLost:  # all have left
            self._stop.wait(0.01)
            return
        known = self.edges.hear(peer, message, self.coder)
        if tag == ASK:
            with self._lock:
                answer, mine = self._tell(peer)
                self._gain(known, mine)
            self._send(peer, answer, ANSWER)
        elif self._asked is not None and self._asked[0] == peer:
            with self._lock:
                self._gain(known, self._asked[1])
            self._asked = None

    def _ask(self) -> None:
        present = [friend for friend in self.friends if friend in self.mesh.peers]
        if present:
            peer = present[int(self.draw.integers(len(present)))]
            with self._lock:
                message, mine = self._tell(peer)
            self._asked = (peer, mine)
            self._send(peer, message, ASK)
        self.wants = False

    def _tell(self, peer: int) -> tuple[Tensor, Tensor]:
        """The message that tells a peer where this worker is now, and a copy of what it then knows."""
        self._draws += self.mesh.world_size
        message, mine = self.edges.tell(peer, self._published + self._gained, self.coder, self._draws)
        return message, mine.clone()

    def _gain(self, theirs: Tensor, mine: Tensor) -> None:
        """Move towards the other by what it moves, or has moved, towards us."""
        self._gained.add_(theirs, alpha=self.pull).sub_(mine, alpha=self.pull)
        self._met += 1

    def _send(self, peer: int, message: Tensor, tag: int) -> None:
        try:
            self.mesh.send_to(peer, message, tag)
            self.sent_nbytes += message.nbytes
        except PeerLost:  # found out by the next look at the peers
            return
