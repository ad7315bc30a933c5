"""The torch.distributed engine: gloo on processors, NCCL on GPUs, always on a process group of our own.

gloo aborts the process when a message is longer than its receive, and takes messages of the wrong call without a
word. So every message carries a tag made from the call (see `Call.code`) and the round: messages of different calls
never match, the wait runs out instead, and the notice board then says who called what, who stopped, or who left.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import CollectiveTimeout, Mismatch, PeerLost, TransportError
from laconic.transports.base import DEFAULT_TIMEOUT_S, Arena, Incoming, Outgoing, Posted, Transport, members_of
from laconic.transports.board import Board, Notice, StoreGone
from laconic.transports.call import Call

_log = logging.getLogger("laconic.transports")
_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class TorchTransport(Transport):
    """One rank on a torch.distributed process group that nobody else uses.

    Args:
        store: where the ranks meet; give each generation a fresh prefix.
        group: an existing group to run on instead of making one (NCCL and other backends).
        store_host: the rank whose process holds the store, if any: when the store is gone, so is that rank.
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
    ) -> None:
        super().__init__(rank, world_size, timeout_s)
        self.store = store
        self.store_host = store_host
        self.arena = Arena()
        self.broken: TransportError | None = None
        self._last = (0, "")
        self.board = Board(dist.PrefixStore("board", store), rank, world_size, self._doing)
        try:
            if group is None:
                meet = dist.PrefixStore("gloo", store)
                group = dist.ProcessGroupGloo(meet, rank, world_size, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.board.close()
            raise CollectiveTimeout(
                f"[rank {rank}/{world_size}]: the {world_size} ranks did not all connect in {timeout_s:g} s: {error}",
                rank=rank,
            ) from error
        self.group = group
        self._is_gloo = "gloo" in str(group.name()).lower()
        if not self._is_gloo:
            self.has_futures = self.interleaves = False
            self.engine = str(group.name()).lower()

    def _doing(self) -> tuple[int, str]:
        """The oldest call under way, which is the one that is waited for, or the last there was."""
        if calls := self.calls:
            self._last = (calls[0].sequence, calls[0].signature)
        return self._last

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        if self.broken is not None:
            raise self.broken
        if recvs:
            self.arena.recycle()
        tag = (call.code + round * 0x9E3779B1) & 0x7FFFFFFF
        targets = [self.arena.take(r) if r.into is None else r.into for r in recvs]
        posted = _TorchRound(self, call, sends, recvs, targets, round)
        if self._is_gloo:
            for recv, target in zip(recvs, targets, strict=True):
                posted.start("recv", recv.peer, target, tag)
            for send in sends:
                posted.start("send", send.peer, send.data, tag)
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
                made = dist.new_group([ranks[member] for member in members_of(colours, first)])
                group = made if colours[first] == colours[self.rank] else group
        return TorchTransport(
            dist.PrefixStore(f"split{self._splits}/{colours[self.rank]}", self.store),
            members.index(self.rank),
            len(members),
            self.timeout_s,
            group=group,
            store_host=members.index(self.store_host) if self.store_host in members else None,
        )

    def native_all_reduce(self, tensor: Tensor, op: str) -> bool:
        self._begin_native(tensor, op)()
        return True

    def start_native(self, tensor: Tensor) -> Callable[[], None]:
        return self._begin_native(tensor, "sum")

    def native_future(self, tensor: Tensor) -> Any:
        if self.broken is not None:
            raise self.broken
        return self.group.allreduce([tensor], dist.AllreduceOptions()).get_future()

    def _begin_native(self, tensor: Tensor, op: str) -> Callable[[], None]:
        if self.broken is not None:
            raise self.broken
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_NATIVE_OPS[op])
        try:
            work = self.group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self.explain(error) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.explain(error) from error

        return wait

    def explain(
        self, error: Exception, peer: int | None = None, round: int | None = None, call: Call | None = None
    ) -> TransportError:
        """Turn gloo's words into ours: who is to blame, by the notice board. The transport is broken afterwards.

        Args:
            call: where it happened; None: in the current one, if any.
        """
        call = call or self.current
        where = self.where() if call is None else call.where(round)
        try:
            verdict = self._verdict(where, error, peer, round, call)
        except StoreGone:
            culprit = self.store_host if self.store_host is not None else peer
            whose = f", and with it peer {culprit}, which holds it" if self.store_host is not None else ""
            text = f"{where}: the store does not answer{whose}; waiting for peer {peer}"
            verdict = PeerLost(text, rank=self.rank, peer=culprit, round=round)
        _log.warning("%s", verdict)
        self.broken = verdict
        self.board.leave(str(verdict), -1 if verdict.peer is None else verdict.peer)
        return verdict

    def _verdict(
        self, where: str, error: Exception, peer: int | None, round: int | None, call: Call | None
    ) -> TransportError:
        begun = time.monotonic()
        self.board.publish()
        first = self.board.notices()
        mismatch = self._mismatch(where, first, round, call)
        if mismatch is not None:
            return mismatch
        silent = self.board.silent(first, begun)
        if silent:
            lost = peer if peer in silent else min(silent)
            return PeerLost(
                f"{where}: peer {lost} was lost: it has died, stopped or been cut off", rank=self.rank, peer=lost,
                round=round,
            )  # fmt: skip
        last = self.board.notices()
        mismatch = self._mismatch(where, last, round, call)
        if mismatch is not None:
            return mismatch
        blamed = next((n for r, n in last.items() if n.left and n.blames not in (-1, self.rank)), None)
        if blamed is not None:
            said = last[blamed.blames].left if blamed.blames in last else ""
            how = f"has left: {said}" if said else "was lost, as another rank found"
            text = f"{where}: peer {blamed.blames} {how}"
            return PeerLost(text, rank=self.rank, peer=blamed.blames, round=round)
        gone = next((r for r, n in last.items() if n.left and r != self.rank and (peer is None or r == peer)), None)
        if gone is not None:
            text = f"{where}: peer {gone} has left: {last[gone].left}"
            return PeerLost(text, rank=self.rank, peer=gone, round=round)
        if "imed out" in str(error) or "timeout" in str(error).lower():
            text = f"{where}: nothing from or for peer {peer} in {self.timeout_s:g} s, though every rank is alive"
            return CollectiveTimeout(text, rank=self.rank, peer=peer, round=round)
        return TransportError(f"{where}: peer {peer}: {error}", rank=self.rank, peer=peer, round=round)

    def _mismatch(
        self, where: str, notices: dict[int, Notice], round: int | None, call: Call | None
    ) -> Mismatch | None:
        """Another rank in the same call number with another signature."""
        if call is None:
            return None
        for rank, notice in notices.items():
            if notice.sequence == call.sequence and notice.signature != call.signature:
                return Mismatch(
                    f"{where}: this rank called {call.signature}, rank {rank} called {notice.signature}",
                    rank=self.rank,
                    peer=rank,
                    round=round,
                )
        return None

    def break_off(self, failure: TransportError) -> None:
        self.broken = self.broken or failure

    def abandon(self, reason: str) -> None:
        if self.calls:
            self.board.leave(reason)
        super().abandon(reason)

    def close(self) -> None:
        self.board.leave("closed")
        self.board.close()
        if self.group is not None:
            with contextlib.suppress(RuntimeError):
                self.group.shutdown()
            self.group = None
        if self.broken is None:
            self.broken = TransportError(f"{self.where()}: the transport is closed", rank=self.rank)


class _TorchRound(Posted):
    def __init__(
        self,
        owner: TorchTransport,
        call: Call,
        sends: Sequence[Outgoing],
        recvs: Sequence[Incoming],
        targets: list[Tensor],
        round: int,
    ) -> None:
        self.owner = owner
        self.call = call
        self.sends = sends
        self.recvs = recvs
        self.targets = targets
        self.round = round
        self.recv_works: list[Any] = []
        self.send_works: list[Any] = []

    def start(self, what: str, peer: int, data: Tensor, tag: int) -> None:
        """Post one gloo message."""
        group = self.owner.group
        try:
            if what == "recv":
                self.recv_works.append(group.recv([data], peer, tag))
            else:
                self.send_works.append(group.send([data], peer, tag))
        except RuntimeError as error:
            raise self.owner.explain(error, peer, self.round, self.call) from error

    def start_batch(self, tag: int) -> None:
        """Post the whole round at once, as NCCL needs it."""
        group = self.owner.group
        operations = [
            dist.P2POp(dist.irecv, t, group=group, tag=tag, group_peer=r.peer)
            for r, t in zip(self.recvs, self.targets, strict=True)
        ]
        operations += [dist.P2POp(dist.isend, s.data, group=group, tag=tag, group_peer=s.peer) for s in self.sends]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self.owner.explain(error, operations[0].group_peer, self.round, self.call) from error
        # NCCL hands back one work for the whole batch, other backends one per operation.
        self.recv_works = works[: len(self.recvs)] if len(works) == len(operations) else works * len(self.recvs)
        self.send_works = works[len(self.recvs) :] if len(works) == len(operations) else works * len(self.sends)

    def received(self, index: int) -> Tensor:
        self._wait(self.recv_works[index], self.recvs[index].peer)
        return self.targets[index]

    def sent(self) -> None:
        for work, send in zip(self.send_works, self.sends, strict=True):
            self._wait(work, send.peer)

    def _wait(self, work: Any, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self.owner.explain(error, peer, self.round, self.call) from error
        if torch.cuda.is_available() and not self.owner._is_gloo:
            torch.cuda.current_stream().synchronize()
