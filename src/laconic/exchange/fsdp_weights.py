"""FSDP2's gather of weights through a codec: as they are, or as differences to what all ranks have already.

Caller: `fsdp.ShardedCompression`, by `compress(…, weights="dynamic8")` on a 1-D mesh. A rank keeps its shard in full;
what it sends is encoded once, and all ranks, itself included, compute with what the payload decodes to: the same bits
everywhere. Vectors and other exempt parameters are sent as they are.

    codec              x̂ = decode(encode(x)), in forward and again in backward, with the same draws
    differences+codec  x̂ ← x̂ + decode(encode(x − x̂)): what a payload leaves out is in the next difference. The first
                       gather sends x̂ = x as it is. In backward nothing is sent, for all have x̂

The gather itself is torch's, of payloads that are of one length, and the next one is under way while a layer is
computed where FSDP asks for it ahead, as it does in backward.

Source: Markov et al., Quantized Distributed Training of Large Models with Convergence Guarantees, ICML 2023, for
gathers of quantised weights; Jia et al., SDP4Bit, NeurIPS 2024, for differences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.codecs.frame import aligned
from laconic.errors import BadInput, PayloadError
from laconic.exchange.coded import Channel, decode
from laconic.exchange.fsdp_layout import ParameterShard, all_gather, columns, laid_out
from laconic.exchange.job import BucketRecord

if TYPE_CHECKING:
    from laconic.exchange.fsdp import ShardedCompression

DIFFERENCES = "differences+"


@dataclass(frozen=True)
class WeightCodec:
    """What weights are sent through, and whether only what has changed is.

    >>> str(WeightCodec.of("differences+int4"))
    'differences+int4'
    """

    codec: Codec
    differences: bool = False

    @classmethod
    def of(cls, given: str | Codec) -> WeightCodec:
        """The codec that a user names; BadInput if it leaves most weights out, or its payloads vary in length."""
        text = given if isinstance(given, str) else ""
        found = cls(codec(text.removeprefix(DIFFERENCES) or given), text.startswith(DIFFERENCES))
        if found.codec.kind == "matrix" or not found.codec.fixed_size:
            raise BadInput(f"weights cannot be gathered through '{found.codec}': its payloads vary in length")
        if not found.differences and getattr(found.codec, "fraction", None) is not None:
            raise BadInput(f"weights cannot be gathered through '{found.codec}', which leaves most of them out")
        return found

    def __str__(self) -> str:
        return f"{DIFFERENCES if self.differences else ''}{self.codec}"


class _Gather(dist.Work):
    """A gather that is under way; torch waits for it where it needs the weights."""

    def __init__(self, work: Any, finish: Any) -> None:
        super().__init__()
        self._work, self._finish = work, finish

    def wait(self, timeout: Any = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            if self._work is not None:
                self._work.wait()
            finish()
        return True


class CompressedAllGather:
    """The all-gather of parameter group `index`, DTensors in order, for `set_custom_all_gather`."""

    def __init__(
        self, state: ShardedCompression, index: int, parameters: Sequence[tuple[str, Any]], spec: WeightCodec
    ) -> None:
        self.state, self.index, self.parameters, self.spec = state, index, parameters, spec
        self.step = -1  # of forwards, each with draws of its own
        self._shards: list[ParameterShard] = []
        self._mirror: Tensor | None = None  # P rows: what all ranks have, for differences
        self._saved: Tensor | None = None  # this rank's row of it, of a checkpoint
        self._rank = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for torch."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather every rank's `input_tensor` into a row of `output_tensor`."""
        size, self._rank = group.size(), group.rank()
        self._shards = self._shards or laid_out(self.parameters, size, self.state.buckets.options.exemptions)
        known = self._shards[-1].stop == input_tensor.numel() and input_tensor.is_floating_point()
        if self.state.closed or not known:  # weights of several types travel as bytes, and torch does not say which
            return all_gather(output_tensor, input_tensor, group, async_op)
        rows = output_tensor.view(size, -1)
        backward = torch._C._current_graph_task_id() != -1
        self.step += not backward or self.step < 0
        if not self.spec.differences:
            return self._start(rows, input_tensor, group)
        if backward and self._mirror is not None:
            rows.copy_(self._mirror)
            return None
        if self._mirror is None:
            self._mirror = self._shared(input_tensor if self._saved is None else self._saved, rows, group)
            if self._saved is None:
                rows.copy_(self._mirror)
                return None
            self._saved = None
        return self._start(rows, input_tensor, group)

    def _shared(self, row: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Every rank's `row` as it is, in float32 on the host."""
        begun, given = time.perf_counter(), row.to(rows.device).contiguous()
        taken = torch.empty(rows.shape, dtype=given.dtype, device=rows.device)
        all_gather(taken.view(-1), given, group)
        self._keep(rows.numel(), "none", begun, 0.0, given.nbytes * (group.size() - 1))
        return taken.to("cpu", torch.float32, copy=True)

    def _start(self, rows: Tensor, given: Tensor, group: dist.ProcessGroup) -> _Gather:
        """Encode this rank's row and start the gather of payloads."""
        begun, size = time.perf_counter(), group.size()
        coded, exact = [s for s in self._shards if not s.exempt], [s for s in self._shards if s.exempt]
        own = given.detach().to("cpu", torch.float32).view(1, -1)
        change = own - self._mirror[self._rank] if self._mirror is not None else own
        numel = sum(s.stop - s.start for s in coded)
        room_nbytes = aligned(self.spec.codec.max_nbytes(numel)) if numel else 0
        as_it_is = columns(given.detach().cpu().view(1, -1), exact).view(-1) if exact else given.new_empty(0).cpu()
        message = torch.zeros(room_nbytes + as_it_is.nbytes, dtype=torch.uint8)
        if numel:
            values, draws = columns(change, coded).view(-1), self.step * size + self._rank
            Channel(values, self.spec.codec).encode(values, (0, 0, numel), draws, message[:room_nbytes])
        message[room_nbytes:] = as_it_is.view(torch.uint8)
        encode_s = time.perf_counter() - begun
        messages = torch.empty(size, message.numel(), dtype=torch.uint8, device=rows.device)
        work = all_gather(messages.view(-1), message.to(rows.device), group, async_op=True)

        def finish() -> None:
            for rank, each in enumerate(messages.cpu()):
                self._take(rank, size, rows, each, (coded, numel, room_nbytes), exact)
            self._keep(rows.numel(), str(self.spec), begun, encode_s, message.numel() * (size - 1))

        return _Gather(work, finish)

    def _take(
        self, rank: int, size: int, rows: Tensor, message: Tensor, sent: tuple[list[ParameterShard], int, int],
        exact: list[ParameterShard],
    ) -> None:  # fmt: skip
        """Decode one rank's message into its row."""
        coded, numel, room_nbytes = sent
        if numel:
            values = torch.empty(numel) if self._mirror is None else columns(self._mirror[rank : rank + 1], coded)[0]
            length = self.spec.codec.max_nbytes(numel)
            try:
                decode(self.spec.codec, message[:length], values, add=self._mirror is not None)
            except PayloadError as error:
                where = f"[rank {self._rank}/{size}] weights of group {self.index}, forward {self.step}"
                raise PayloadError(f"{where}: from rank {rank}: {error}") from error
            self._put(rank, rows, coded, values)
        if exact:
            self._put(rank, rows, exact, message[room_nbytes:].view(rows.dtype))

    def _put(self, rank: int, rows: Tensor, shards: list[ParameterShard], values: Tensor) -> None:
        """Write side by side values to where torch, and the mirror, have these shards."""
        for shard, part in zip(shards, values.split([s.stop - s.start for s in shards]), strict=True):
            rows[rank, shard.start : shard.stop] = part
            if self._mirror is not None:
                self._mirror[rank, shard.start : shard.stop] = part

    def _keep(self, numel: int, spec: str, begun: float, encode_s: float, nbytes: int) -> None:
        taken = time.perf_counter() - begun
        step = max((group.step for group in self.state.groups), default=0)
        what = (step, self.index, numel, spec, "gather", taken, encode_s, 0.0, 0.0, nbytes, 1)
        self.state.gathered.append(BucketRecord(*what, made=begun, begun=begun))

    # checkpoints

    def own_row(self) -> Tensor | None:
        """What all ranks have of this rank's shards, to go on with differences to the bit."""
        return self._saved if self._mirror is None else self._mirror[self._rank].clone()

    def check_row(self, row: Any) -> None:
        """Refuse a row that is not of this group."""
        if row is not None and not (isinstance(row, Tensor) and row.dtype == torch.float32 and row.dim() == 1):
            raise BadInput(f"the state's weights of group {self.index} are no row of float32")
        if row is not None and self._shards and row.numel() != self._shards[-1].stop:
            text = f"has {row.numel()} weights of group {self.index}, this rank {self._shards[-1].stop}"
            raise BadInput(f"the state {text}: it is of another model or number of ranks")

    def restore(self, step: int, row: Tensor | None) -> None:
        """Go on from `step`; the next gather lets all ranks have this row first."""
        self.step, self._mirror = step - 1, None
        self._saved = row.clone() if row is not None and self.spec.differences else None
