"""The torch.distributed engine: gloo on processors, NCCL on GPUs, always on a process group of our own.

A group that takes tensors of one kind of device only, as NCCL's does, is given messages from the processor's memory by
way of the device that was current when the transport was made: handshakes, probes and payloads. A round is one batch
of sends and receives, as NCCL's own all_to_all is. Such messages have the length of their receive. Payloads that lie on
that device travel by all_to_all_single and all_gather_into_tensor.

gloo aborts the process when a message is longer than its receive, and silently accepts messages of the wrong call. So
every message carries a tag made from the call (see `Call.code`) and the round. Messages of different calls never match;
the wait times out instead, and the notice board shows which rank made another call, stopped or left.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import BadInput, CollectiveTimeout, Mismatch, PeerLost, TransportError
from laconic.transports.base import DEFAULT_TIMEOUT_S, Arena, Call, Incoming, Outgoing, Posted, Transport, members_of
from laconic.transports.board import Board, Notice, StoreGone

_log = logging.getLogger("laconic.transports")
_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


Verdict = tuple[type[TransportError], str, int | None]  # what happened, and who in the job is to blame


class TorchTransport(Transport):
    """One rank on a torch.distributed process group that nobody else uses.

    Args:
        store: where the ranks meet; give each generation a fresh prefix.
        group: an existing group to run on instead of making one (NCCL and other backends).
        store_host: the number in the job of the rank whose process holds the store, if any does: both go together.
        within: the transport that this one is a part of, and which of its ranks.
    """

    engine = "gloo"
    has_futures = True
    interleaves = True  # messages carry their call's code as a tag

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        group: Any = None,
        store_host: int | None = None,
        within: tuple[Transport, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(rank, world_size, timeout_s)
        if within is not None:
            within[0].adopt(self, within[1])
        self.store = store
        self.store_host = store_host
        self.arena = Arena()
        self._last = (0, "")
        ranks = [self.named(each) for each in range(world_size)]
        self.board = Board(dist.PrefixStore("board", store), ranks[rank], ranks, self._doing)
        try:
            self.group = group
            if group is None:
                meet = dist.PrefixStore("gloo", store)
                group = dist.ProcessGroupGloo(meet, rank, world_size, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.board.close()
            text = f"the {world_size} ranks did not all connect in {timeout_s:g} s: {error}"
            raise self.failure(CollectiveTimeout, text) from error
        self.group = group
        self._is_gloo = "gloo" in str(group.name()).lower()
        if not self._is_gloo:
            self.has_futures = self.interleaves = False
            self.engine = str(group.name()).lower()
            self.sized = True
            self.device = _device_of(group)
            self.collects = self.device.type != "cpu"

    def _doing(self) -> tuple[int, str]:
        """The oldest call under way, which is the one being waited for, or else the last call."""
        if calls := self.calls:
            self._last = (calls[0].sequence, calls[0].signature)
        return self._last

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        self.check_usable()
        if self.sized and any(recv.at_most for recv in recvs):
            raise BadInput(f"{call.where(round)}: {self.engine} sends no messages of varying length; use gloo or zmq")
        if recvs:
            self.arena.recycle()
        tag = (call.code + round * 0x9E3779B1) & 0x7FFFFFFF
        targets = [self.arena.take(r) if r.into is None else r.into for r in recvs]
        posted = _TorchRound(self, call, sends, recvs, targets, round)
        if self._is_gloo:
            posted.start(tag)
        else:
            posted.start_batch(tag)
        return posted

    def split(self, colours: Sequence[int]) -> Transport:
        self._splits += 1
        members = members_of(colours, self.rank)
        group = None
        if not self._is_gloo:  # other backends make every group on every rank
            ranks = dist.get_process_group_ranks(self.group)
            for first in dict.fromkeys(map(colours.index, colours)):
                members = [ranks[member] for member in members_of(colours, first)]
                made = dist.new_group(members, backend=dist.get_backend(self.group))
                group = made if colours[first] == colours[self.rank] else group
        return TorchTransport(
            dist.PrefixStore(f"split{self._splits}/{colours[self.rank]}", self.store),
            members.index(self.rank),
            len(members),
            self.timeout_s,
            group=group,
            store_host=self.store_host,
            within=(self, members),
        )

    def native_all_reduce(self, tensor: Tensor, op: str) -> bool:
        self._begin_native(tensor, op)()
        return True

    def start_native(self, tensor: Tensor) -> Callable[[], None]:
        return self._begin_native(tensor, "sum")

    def native_future(self, tensor: Tensor) -> Any:
        self.check_usable()
        return self.group.allreduce([tensor], dist.AllreduceOptions()).get_future()

    def _begin_native(self, tensor: Tensor, op: str) -> Callable[[], None]:
        self.check_usable()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_NATIVE_OPS[op])
        values = self.there(tensor)
        with self._explained():
            work = self.group.allreduce([values], options)

        def wait() -> None:
            with self._explained():
                work.wait()
                if values is not tensor:
                    tensor.copy_(values)

        return wait

    def start_all_to_all(
        self, target: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Callable[[], None]:
        return self._begin(
            lambda: dist.all_to_all_single(target, source, list(received), list(sent), self.group, async_op=True)
        )

    def start_all_gather(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        return self._begin(lambda: _all_gather(target, source, self.group, async_op=True))

    def late(self, call: Call, round: int) -> TransportError:
        return self.explain(TimeoutError("timed out"), None, round, call)

    def _begin(self, start: Callable[[], Any]) -> Callable[[], None]:
        self.check_usable()
        with self._explained():
            work = start()

        def wait() -> None:
            with self._explained():
                work.wait()

        return wait

    def there(self, tensor: Tensor) -> Tensor:
        """The tensor, or its copy where the group takes tensors of a device only."""
        return tensor.to(self.device) if tensor.is_cpu else tensor

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error) from error

    def explain(
        self, error: Exception, peer: int | None = None, round: int | None = None, call: Call | None = None
    ) -> TransportError:
        """Turn gloo's error into ours; the notice board names the rank to blame. The transport is broken afterwards."""
        call, peer = call or self.current, None if peer is None else self.named(peer)
        try:
            kind, text, culprit = self._verdict(error, peer, call)
        except StoreGone:
            host = self.store_host
            kind, culprit = PeerLost, peer if host is None else host
            whose = "" if host is None else f", and with it peer {host}, which holds it"
            text = f"the store does not answer{whose}; waiting for peer {peer}"
        verdict = self.failure(kind, text, culprit, round, call)
        _log.warning("%s", verdict)
        self.give_up(verdict)
        self._leave(verdict)
        return verdict

    def _verdict(self, error: Exception, peer: int | None, call: Call | None) -> Verdict:
        begun = time.monotonic()
        self.board.publish()
        first = self.board.notices()
        if (mismatch := _mismatch(first, call)) is not None:
            return mismatch
        culprit: int | None = None
        if silent := self.board.silent(first, begun):
            culprit = peer if peer in silent else min(silent)
        elif (mismatch := _mismatch(self.board.notices(), call)) is not None:
            return mismatch
        else:
            others = [loss for loss in self.board.lost.values() if loss.peer != self.board.rank]
            blamed = [loss.peer for loss in others if not loss.has_left]
            left = [loss.peer for loss in others if loss.has_left and peer in (None, loss.peer)]
            culprit = next(iter([*blamed, *left]), None)
        if culprit is not None:
            return PeerLost, f"peer {culprit} {self.board.lost[culprit].why}", culprit
        if "imed out" in str(error) or "timeout" in str(error).lower():
            text = f"nothing from or for peer {peer} in {self.timeout_s:g} s, though every rank is alive"
            return CollectiveTimeout, text, peer
        return TransportError, f"peer {peer}: {error}", peer

    def _leave(self, why: TransportError) -> None:
        self.board.leave(str(why), -1 if why.peer is None else why.peer)

    def abandon(self, reason: str, *, expected: bool = False) -> None:
        if self.calls or expected:
            self.board.leave(reason)
        super().abandon(reason, expected=expected)

    def close(self) -> None:
        if (cause := self.whole.cause) is not None:
            self._leave(cause)
        self.board.leave("closed")
        self.board.close()
        if self.group is not None:
            with contextlib.suppress(RuntimeError):
                getattr(self.group, "shutdown", lambda: None)()  # torch 2.6 closes it with the last reference
            self.group = None
        self.broken = self.broken or self.failure(TransportError, "the transport is closed")


def _device_of(group: Any) -> torch.device:
    """The processor, or the present device of the one kind that a group's backend takes."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.empty(0, device=kinds[0]).device


def _mismatch(notices: dict[int, Notice], call: Call | None) -> Verdict | None:
    """Another rank in the same call number with another signature."""
    if call is None:
        return None
    for rank, notice in notices.items():
        if notice.sequence == call.sequence and notice.signature != call.signature:
            theirs = f"rank {rank} called {notice.signature}"
            text = f"this rank called {call.signature}, {theirs}"
            return Mismatch, text, rank
    return None


@dataclass(eq=False)
class _TorchRound(Posted):
    owner: TorchTransport
    call: Call
    sends: Sequence[Outgoing]
    recvs: Sequence[Incoming]
    targets: list[Tensor]
    round: int
    recv_works: list[Any] = field(default_factory=list)
    send_works: list[Any] = field(default_factory=list)
    waited: list[RuntimeError | None] = field(default_factory=list)  # how the first waits for recv_works ended
    waiting: threading.Lock = field(default_factory=threading.Lock)
    received_there: list[Tensor] = field(default_factory=list)  # the targets, or their twins on the group's device

    def start(self, tag: int) -> None:
        """Post the messages one by one, as gloo takes them."""
        group, peer = self.owner.group, None
        try:
            for recv, target in zip(self.recvs, self.targets, strict=True):
                peer = recv.peer
                self.recv_works.append(group.recv([target], peer, tag))
            for send in self.sends:
                peer = send.peer
                self.send_works.append(group.send([send.data], peer, tag))
        except RuntimeError as error:
            raise self.owner.explain(error, peer, self.round, self.call) from error

    def start_batch(self, tag: int) -> None:
        """Post the whole round at once, as NCCL needs it."""
        group, there = self.owner.group, self.owner.there
        self.received_there = [there(target) for target in self.targets]
        operations = [
            dist.P2POp(dist.irecv, t, group=group, tag=tag, group_peer=r.peer)
            for r, t in zip(self.recvs, self.received_there, strict=True)
        ]
        operations += [
            dist.P2POp(dist.isend, there(s.data), group=group, tag=tag, group_peer=s.peer) for s in self.sends
        ]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self.owner.explain(error, operations[0].group_peer, self.round, self.call) from error
        # NCCL hands back one work for the whole batch, other backends one per operation.
        self.recv_works = works[: len(self.recvs)] if len(works) == len(operations) else works * len(self.recvs)
        self.send_works = works[len(self.recvs) :] if len(works) == len(operations) else works * len(self.sends)

    def received(self, index: int) -> Tensor:
        self._come(index + 1)
        if (error := self.waited[index]) is not None:
            raise self.owner.explain(error, self.recvs[index].peer, self.round, self.call) from error
        if self.received_there and self.received_there[index] is not self.targets[index]:
            self.targets[index].copy_(self.received_there[index])
        return self.targets[index]

    def waiter(self) -> Callable[[], None] | None:
        return (lambda: self._come(len(self.recvs))) if self.owner._is_gloo else None

    def _come(self, count: int) -> None:
        """Wait for the first messages; once for each, as gloo's works demand."""
        with self.waiting:
            for work in self.recv_works[len(self.waited) : count]:
                self.waited.append(_ended(work))

    def sent(self) -> None:
        for work, send in zip(self.send_works, self.sends, strict=True):
            if (error := _ended(work)) is not None:
                raise self.owner.explain(error, send.peer, self.round, self.call) from error


def _ended(work: Any) -> RuntimeError | None:
    """Wait for a message; return its error, if any."""
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return None
