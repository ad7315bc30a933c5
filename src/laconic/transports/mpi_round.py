"""What `MpiTransport.post` returns: the requests of one round, and how to wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laconic.errors import BadInput, Mismatch
from laconic.transports.base import Incoming, Outgoing, Posted

if TYPE_CHECKING:
    from laconic.transports.mpi import MpiTransport


class MpiRound(Posted):
    """The requests of one round, with the tensors they read and write."""

    def __init__(
        self, owner: MpiTransport, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int, tag: int
    ) -> None:
        self.owner = owner
        self.round = round
        mpi, comm = owner.mpi, owner.comm
        self.sends = sends
        self.recvs = recvs
        self.targets = [owner.arena.take(r) if r.into is None else r.into for r in recvs]
        for tensor in (*self.targets, *(send.data for send in sends)):
            check_cpu(tensor)
        # Receives first, so that a message that is already here lands where it belongs at once.
        self.incoming = [
            comm.Irecv([memory_of(mpi, target), mpi.BYTE], recv.peer, tag)
            for recv, target in zip(recvs, self.targets, strict=True)
        ]
        self.outgoing = [comm.Isend([memory_of(mpi, send.data), mpi.BYTE], send.peer, tag) for send in sends]

    def received(self, index: int) -> Tensor:
        owner, peer, target = self.owner, self.recvs[index].peer, self.targets[index]
        nbytes = owner.wait_for(self.incoming[index], peer, self.round)
        if self.recvs[index].at_most:
            return target.view(torch.uint8)[:nbytes].view(target.dtype)
        if nbytes != target.nbytes:
            text = f"peer {peer} sent {nbytes} bytes, {owner.signature} has {target.nbytes}"
            owner.fail(owner.failure(Mismatch, text, peer, self.round))
        return target

    def sent(self) -> None:
        for send, request in zip(self.sends, self.outgoing, strict=True):
            self.owner.wait_for(request, send.peer, self.round)

    def cancel(self) -> None:
        """Withdraw the receives that nothing has matched; what is under way stays, and its memory with it."""
        for request in self.incoming:
            try:
                if not request.Test():
                    request.Cancel()
                    request.Test()
            except self.owner.mpi.Exception:  # the failure that brought us here is what the user must see
                continue


def memory_of(mpi: Any, tensor: Tensor) -> Any:
    """The tensor's bytes as a buffer: 0.4 µs against 2.7 µs by way of NumPy, and for every dtype."""
    return mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


def check_cpu(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise BadInput(f"the mpi engine takes tensors in main memory, got one on {tensor.device}; use engine 'nccl'")
