"""Asynchronous gossip: workers average in pairs, each at its own pace, and nobody waits for a slow one.

Caller: `gossip(asynchronous=true)`. A worker's thread owns a mesh beside the world. After a step it asks one
acquaintance, which answers at once with where it was and moves by ½γ(x̂ᵢ − x̂ⱼ); with the answer the asker moves by as
much the other way. So the sum over all workers never changes, whatever happened to both meanwhile. A thread never waits
for an answer: it goes on answering others, so a cycle of askers cannot deadlock. When a worker is lost, the others
redraw their acquaintances from the same graph, and ignore later messages of the lost one.

The thread works on a published copy of the weights; what it adds up reaches the model between steps, so a gradient is
always that of one set of weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.plans import flat_codec
from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.averaging import ModelMean, OwnWeights
from laconic.consistency.base import Setup
from laconic.consistency.closing import Closing
from laconic.consistency.gossip.edges import Edges, trust
from laconic.consistency.servers.messages import ServerKind, ServerMessage, unpack
from laconic.consistency.worker_mesh import open_mesh
from laconic.errors import CollectiveTimeout, PeerLost
from laconic.storage.form import check_like
from laconic.transports.frame import NOTHING, Frame, Header, MessageKind, family
from laconic.transports.zeromq import ZmqTransport


@family
class PairKind(MessageKind):
    """What a message of a pair is for.

    `sequence` counts the messages of its edge so far: it differs from what its receiver counted where one of the two
    was restored from an older checkpoint than the other.
    """

    ASK = 96
    ANSWER = 97
    ANEW = 98


class PairsAgreement(OwnWeights):
    """Asynchronous gossip at work: `Gossip` says what it does.

    A checkpoint holds the copies of what neighbours know and are known to be at. Workers save theirs at different
    moments; an edge whose ends do not fit together after a restart begins anew, alike at both ends.

    Args:
        friends: the ranks that are left → those that this one may ask.
    """

    def __init__(
        self, setup: Setup, friends: Callable[[Sequence[int]], list[int]], gamma: float | None, seed: int
    ) -> None:
        assert isinstance(setup.codec, str | Codec)  # a plan by steps has no meaning: workers are at different ones
        coder, world = flat_codec(setup.codec), setup.world
        super().__init__(setup)
        self.liveness = self.losses = AgreedLosses(world, "gossip")
        self.end = ModelMean(self.weights.values, setup.model)
        self.pairs: _Pairs | None = None
        if not self.alone:
            pull = 0.5 * (trust(coder) if gamma is None else gamma)
            draw = np.random.Generator(np.random.Philox(key=[seed, world.rank]))
            self.pairs = _Pairs(
                open_mesh(world), self.losses, self.weights.values, coder, pull, PartnerChoice(friends, draw)
            )
            self._closing = Closing(self.pairs.mesh, self.losses, self.pairs.send_note, self.end.merge)
            self.pairs.closing = self._closing
            self.parts["edges"] = self.pairs
            self.resources.callback(self.pairs.close)

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + (self.pairs.sent_nbytes if self.pairs else 0)

    def before_step(self) -> None:
        self._met = 0
        if self.pairs is not None:
            with self.agreeing(), self.weights.current() as values:
                self._met = self.pairs.merge(values)

    def after_step(self) -> None:
        if self.pairs is not None:
            with self.agreeing(), self.weights.current() as values:
                self.pairs.merge(values)
                self.pairs.wants, self.pairs.ended = True, False
        self.settle(staleness=self._met)

    def finish(self) -> None:
        """Leave the exact mean of the weights and buffers of all remaining workers, once they have finished."""
        pairs = self.pairs
        if pairs is None:
            return
        with self.agreeing(), self.weights.current() as values:
            begun = time.perf_counter()
            pairs.merge(values)  # whoever came here without a step can be asked now
            pairs.rest(self.world.transport.timeout_s)
            pairs.stop()
            self.waited(time.perf_counter() - begun)

            def row() -> Tensor:
                pairs.merge(values)  # nobody asks any more
                return self.end.pack()

            mean, wait_s = self._closing.agree(pairs.serve, row)
            self.waited(wait_s)
            self.end.load(mean)
            pairs.merge(values)
            pairs.ended = True
            pairs.start()
        self.settle_finish()


@dataclass(frozen=True)
class PartnerChoice:
    """Chooses which acquaintance a worker asks."""

    friends: Callable[[Sequence[int]], list[int]]
    draw: np.random.Generator

    def one(self, left: Sequence[int], present: Sequence[int]) -> int | None:
        """Choose one of the remaining acquaintances, if any can be reached."""
        able = [friend for friend in self.friends(left) if friend in present]
        return able[int(self.draw.integers(len(able)))] if able else None


class _Pairs:
    """The thread that asks and answers; between `stop` and `start` the caller may `serve` in its place."""

    def __init__(
        self, mesh: ZmqTransport, losses: AgreedLosses, values: Tensor, coder: Codec, pull: float, choice: PartnerChoice
    ) -> None:
        self.mesh, self.losses, self.coder, self.pull, self.choice = mesh, losses, coder, pull, choice
        self.edges = Edges(values)
        self.closing: Closing | None = None
        self.wants = False  # the next acquaintance is to be asked
        self.ended = False  # all have finished, so that they may go
        self.sent_nbytes = 0
        self._published = values.clone()  # where the model was at its last step
        self._known = False
        self._gained = torch.zeros_like(values)  # what pairs have added since
        self._met = 0
        self._draws = mesh.rank
        self._asked: tuple[int, Tensor] | None = None  # whom, and what it was told
        self._asking = False  # a question is being made, which neither `wants` nor `_asked` tells
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.start()

    def start(self) -> None:
        """Ask and answer on a thread of its own from now on."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="laconic-gossip", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def merge(self, values: Tensor) -> int:
        """Apply the pairs' additions to the model and publish it; returns the number of pairs."""
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
        while self._busy() and self._failure is None:
            if time.monotonic() > deadline:
                peer = None if self._asked is None else self._asked[0]
                text = f"{self.mesh.where()} gossip: no answer from rank {peer} in {timeout_s:g} s"
                raise CollectiveTimeout(text, rank=self.mesh.rank, peer=peer)
            time.sleep(0.001)

    def _busy(self) -> bool:
        with self._lock:
            return self.wants or self._asking or self._asked is not None

    def close(self) -> None:
        """End the thread and the mesh."""
        self._stop.set()
        self._thread.join()
        self.mesh.close()

    def state_dict(self) -> dict[str, Any]:
        """The copies of all edges, and what pairs have added that the model has not yet."""
        with self._lock:
            return {**self.edges.state_dict(), "gained": self._gained.clone()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse, with BadInput, a state that cannot be loaded whole."""
        self.edges.check_state(state)
        check_like(state, {"gained": self._gained}, "the state of gossip")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse."""
        with self._lock:
            self.edges.load_state_dict(state)
            self._gained.copy_(state["gained"])
            self._known = False  # nobody is answered before the loaded model is published

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._look_around()
                if self.wants and self._asked is None:
                    self._ask()
                self.serve(1e-4)
        except Exception as error:  # raised in the next step
            self._failure = error

    def _look_around(self) -> None:
        """Give up ranks that are gone."""
        live = {self.mesh.rank, *self.mesh.peers}
        for rank in [] if self.ended else self.losses.here:
            if rank not in live:
                self.losses.give_up(rank)
        if self._asked is not None:
            self.losses.look()
            if self._asked[0] in self.losses.lost:
                self._asked = None  # what it was told is lost with it

    def serve(self, timeout_s: float) -> bool:
        """Receive one message and answer it; False if none came, or no sender is left."""
        if not self._known:  # a checkpoint may have changed the model since it was installed
            self._stop.wait(0.001)
            return False
        try:
            peer, frame = self.mesh.recv_any(timeout_s)
        except CollectiveTimeout:
            return False
        except PeerLost:  # all have left
            self._stop.wait(0.01)
            return False
        if peer in self.losses.lost:
            return True
        if isinstance(frame.kind, ServerKind):
            if self.closing is not None:
                self.closing.take(unpack(frame))
        elif frame.kind is PairKind.ANEW:
            self._begin_anew(peer)
        else:
            self._hear(peer, frame)
        return True

    def _hear(self, peer: int, frame: Frame) -> None:
        kind, count = frame.kind, frame.header.sequence
        with self._lock:
            if count <= 1:  # it begins anew
                self.edges.forget_heard(peer)
            fits = self.coder.exact or count == self.edges.hears.get(peer, 0) + 1
            if fits:
                known = self.edges.hear(peer, frame.payload, self.coder)
                if kind is PairKind.ASK:
                    answer, mine = self._tell(peer)
                    self._gain(known, mine)
                elif self._asked is not None and self._asked[0] == peer:
                    self._gain(known, self._asked[1])
                    self._asked = None
        if not fits:
            self._send(peer, NOTHING, PairKind.ANEW)
            if kind is PairKind.ANSWER:
                self._asked = None
        elif kind is PairKind.ASK:
            self._send(peer, answer, PairKind.ANSWER)

    def _begin_anew(self, peer: int) -> None:
        """Reset an edge whose two copies differ, because the two checkpoints did not fit together."""
        with self._lock:
            self.edges.forget_told(peer)
            if self._asked is not None and self._asked[0] == peer:
                self._asked, self.wants = None, True

    def _ask(self) -> None:
        with self._lock:
            self._asking = True
            self.wants = False  # first: the training may want the next one while this one is sent
        peer = self.choice.one(self.losses.here, self.mesh.peers)
        if peer is not None:
            with self._lock:
                message, mine = self._tell(peer)
            self._asked = (peer, mine)
            self._send(peer, message, PairKind.ASK)
        self._asking = False

    def _tell(self, peer: int) -> tuple[Tensor, Tensor]:
        """Encode this worker's weights for a peer; return the message and a copy of the peer's copy after it."""
        self._draws += self.mesh.world_size
        message, mine = self.edges.tell(peer, self._published + self._gained, self.coder, self._draws)
        return message, mine.clone()

    def _gain(self, theirs: Tensor, mine: Tensor) -> None:
        """Move towards the peer by as much as it moves towards this worker."""
        self._gained.add_(theirs, alpha=self.pull).sub_(mine, alpha=self.pull)
        self._met += 1

    def send_note(self, peer: int, note: ServerMessage) -> None:
        """Send a message about the end of training."""
        self._send_frame(peer, note.frame)

    def _send(self, peer: int, message: Tensor, kind: PairKind) -> None:
        self._send_frame(peer, Frame(Header(kind, self.edges.tells.get(peer, 0)), payload=message))

    def _send_frame(self, peer: int, frame: Frame) -> None:
        try:
            self.mesh.send_to(peer, frame)
            self.sent_nbytes += frame.payload.nbytes
        except PeerLost:  # found out by the next look at the peers
            return
