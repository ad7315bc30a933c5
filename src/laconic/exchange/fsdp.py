"""`laconic.compress(model, codec)` on a model that `torch.distributed.fsdp.fully_shard` was applied to.

Caller: `hook.compress`. On a 1-D mesh the reduce-scatter of gradients goes through the codec, one encoding whatever P,
for the sums stay where they are (`coded.py`); weights are gathered by torch in their own type, or through a codec of
their own (`fsdp_weights.py`). On a 2-D mesh, replicas of shards (HSDP), torch reduces inside a host, and what replicas
send each other goes through the codec (`fsdp_replicas.py`).

On the processor gradients are exchanged while backward goes on: torch takes views of the memory that the sums will be
written to, and backward ends when they have been. Where torch works on them at once instead (another type, gradients
that are added up, hooks), and on a device, the exchange is waited for in place.

Invariant, by parameter: Σ over ranks of (input + residual before) = what the shard's owner got + Σ residual after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.codecs.casts import NoneCodec, carrier_of
from laconic.codecs.plans import CodecPlan, PlannedCodec
from laconic.errors import BadInput
from laconic.exchange.buckets import BucketExchange
from laconic.exchange.coded import Channel, reduce_scatter_steps
from laconic.exchange.collectives import world_of
from laconic.exchange.fsdp_layout import (
    ParameterShard,
    ShardRows,
    columns,
    laid_out,
    parameter_groups,
    reduce_scatter,
    stays_in_place,
)
from laconic.exchange.fsdp_replicas import ReplicaExchange, replicated_groups, shard_stand_ins
from laconic.exchange.fsdp_weights import CompressedAllGather, WeightCodec
from laconic.exchange.host_copies import HostCopies, twins_of
from laconic.exchange.job import BucketRecord, Job, bucket_table
from laconic.exchange.layout import Parameters
from laconic.exchange.options import DEFAULT_CODEC, Options
from laconic.exchange.ownership import owned
from laconic.exchange.residuals import PLAIN
from laconic.exchange.stream import GradientStream
from laconic.exchange.thread import DEPTH
from laconic.transports.base import Pausing, Transport
from laconic.transports.world import World, current

_EXACT = NoneCodec()


class CompressedReduceScatter:
    """The reduce-scatter of parameter group `index`, DTensors in order, for `set_custom_reduce_scatter`.

    torch calls it in backward.
    """

    def __init__(self, state: ShardedCompression, index: int, parameters: Sequence[tuple[str, Any]]) -> None:
        self.state = state
        self.index = index
        self.parameters = parameters
        self.step = 0
        self.codec: Codec | None = None
        self.encoder = PLAIN
        self.shards: list[ParameterShard] = []
        self._copies, self._twins = HostCopies(), list[Tensor]()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate input and output memory for torch."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce the P rows of `input_tensor` over the group; this rank's row goes to `output_tensor`."""
        if self.state.closed:
            return reduce_scatter(output_tensor, input_tensor, op, group, async_op)
        begun = time.perf_counter()
        mean = op == dist.ReduceOp.AVG
        if not mean and op != dist.ReduceOp.SUM:
            raise BadInput("compressed reduce-scatter sums or averages; call set_force_sum_reduction_for_comms(True)")
        later = mean and stays_in_place(self.parameters, output_tensor)
        transport, step = self.state.joined(group), self.step
        rank, size = transport.rank, transport.world_size
        if (scale := self.state.buckets.loss_scale) is not None:
            scale.note(input_tensor)
            self.state.buckets.follow_scale()
        given, result = self._on_host(input_tensor.detach(), output_tensor)
        values = given.to(torch.float32).view(size, -1)
        self.shards = self.shards or laid_out(self.parameters, size, self.state.buckets.options.exemptions)
        if self.shards[-1].stop == values.shape[1]:
            chosen = self.state.buckets.choice.codec_for(self.index, step)
            self._use(chosen, size)
            coded, exact = [s for s in self.shards if not s.exempt], [s for s in self.shards if s.exempt]
        else:  # not all parameters took part, and torch does not say which
            chosen, coded, exact = _EXACT, [], [ParameterShard("", (), 0, 0, values.shape[1], True)]
        channels, as_it_is = [], carrier_of(input_tensor.dtype)
        if coded:
            wire = as_it_is if chosen.exact and self.encoder is PLAIN else chosen
            channels.append(Channel(columns(values, coded), wire, self.encoder))
        if exact:
            channels.append(Channel(columns(values, exact), as_it_is))
        numel, sample = values.numel(), self.state.buckets.sample(channels[0].buffer.view(-1), step)
        del given, values  # while the copies are under way, torch may have the memory back

        def exchanged() -> Pausing[None]:
            timings = yield from reduce_scatter_steps(channels, transport, step)
            for shards, channel in zip(filter(None, (coded, exact)), channels, strict=True):
                parts = channel.buffer[rank].split_with_sizes([s.stop - s.start for s in shards])
                for shard, part in zip(shards, parts, strict=True):
                    result[shard.start : shard.stop] = part
            if mean:
                result.div_(size)
            taken = time.perf_counter() - begun
            self.state.buckets.note_error(sample, chosen, step)
            what = (step, self.index, numel, str(chosen), "direct", taken)
            self.state.buckets.keep(BucketRecord(*what, **vars(timings), made=begun, begun=begun))

        self.step += 1
        self.state.send(exchanged, later=later)
        if result is not output_tensor:
            self._copies.send([(output_tensor, result)])
        return None

    def _on_host(self, given: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output in host memory; for a device, reused pinned memory."""
        if given.is_cpu:
            return given, result
        self._copies.settle()
        if [(twin.shape, twin.dtype) for twin in self._twins] != [(each.shape, each.dtype) for each in (given, result)]:
            self._twins = twins_of([given, result], "gradients")
        self._copies.fetch([(given, self._twins[0])])
        return self._twins[0], self._twins[1]

    def _use(self, chosen: Codec, world_size: int) -> None:
        """Switch to the codec `chosen`; residuals are carried over."""
        coded = tuple(shard for shard in self.shards if not shard.exempt)
        if chosen != self.codec and coded:
            self.encoder = self.state.buckets.residuals.lay_out(ShardRows(coded, world_size), chosen) or PLAIN
        self.codec = chosen

    def restore(self, step: int) -> None:
        """Go on from `step`, with the residuals that were loaded."""
        self.step, self.codec, self.encoder = step, None, PLAIN


class ShardedCompression(Job):
    """What `laconic.compress` returns for an FSDP2 model: settings, records and state of all its groups.

    Args:
        options: exempt, feedback, scaler and world. Feedback keeps one float32 a parameter on every rank, for the whole
            parameter, not for the shard; on a 2-D mesh for the shard. The world is by default one on the ranks of the
            reduce-scatter's own group, or of the replicas'.
        weights: the codec that weights are gathered through, on a 1-D mesh; "differences+CODEC" sends only what has
            changed since the last gather, and keeps a float32 copy of all weights on every rank.

    Raises:
        BadInput: this torch's FSDP has no `set_custom_reduce_scatter`, or another option was given.
    """

    def __init__(
        self, model: nn.Module, codec: CodecPlan | None = None, options: Options | None = None,
        weights: str | Codec | None = None,
    ) -> None:  # fmt: skip
        options = options or Options()
        options.refuse("compress of a model that fully_shard was applied to", ("exempt", "feedback", "scaler"))
        listed, self.closed = parameter_groups(model), False
        for module, _ in listed or [(model, [])]:
            if not hasattr(module, "set_custom_reduce_scatter") or not hasattr(module, "set_custom_all_gather"):
                text = "its FSDP has no set_custom_reduce_scatter; use a newer torch, or DDP"
                raise BadInput(f"compress cannot serve fully_shard on torch {torch.__version__}: {text}")
        self._modules = [module for module, _ in listed]
        trained = [[(name, p) for name, p in own if p.requires_grad] for _, own in listed]
        replicated = [replicated_groups(module) for module in self._modules]
        self.replicas: list[ReplicaExchange] = []
        self.groups: list[CompressedReduceScatter] = []
        self.gathers: list[CompressedAllGather] = []
        if any(replicated):
            if not all(replicated):
                raise BadInput("a model is either replicated in all its parts or in none; fully_shard it on one mesh")
            if weights is not None:
                raise BadInput("weights are gathered inside a host on this 2-D mesh, by torch; leave weights= out")
            stand_ins = [shard_stand_ins(own) for own in trained]
            named = [pair for own in stand_ins for pair in own]
        else:
            named = list(model.named_parameters())
        choice = PlannedCodec(DEFAULT_CODEC if codec is None else codec)
        self.buckets = BucketExchange(choice, Parameters(named, options.exemptions), options)
        self.stream = GradientStream(self.buckets)
        self._under_way: deque[Callable[[], None]] = deque()
        self._backward = -1  # the backward that will wait for what is under way
        if any(replicated):
            for index, (groups, own, like) in enumerate(zip(replicated, trained, stand_ins, strict=True)):
                self.replicas.append(ReplicaExchange(self, index, own, [each for _, each in like], groups))
        else:
            self.groups = [CompressedReduceScatter(self, index, own) for index, own in enumerate(trained)]
        if weights is not None:
            spec = WeightCodec.of(weights)
            self.gathers = [CompressedAllGather(self, i, own, spec) for i, (_, own) in enumerate(listed)]
        self.gathered: deque[BucketRecord] = deque(maxlen=100 * max(1, len(self.gathers)))
        self._whole = any(replicated) and _mesh_size(model) == dist.get_world_size()

    def install(self) -> None:
        """Install the compressed collectives on all groups of the model."""
        for module, reducing in zip(self._modules, self._reducing, strict=True):
            module.set_custom_reduce_scatter(reducing)
        for module, gathering in zip(self._modules, self.gathers, strict=False):
            module.set_custom_all_gather(gathering)
        for replica in self.replicas:
            replica.install()

    @property
    def _reducing(self) -> Sequence[ReplicaExchange | CompressedReduceScatter]:
        return self.replicas or self.groups

    @property
    def records(self) -> deque[BucketRecord]:  # type: ignore[override]  # may be taken out
        return self.buckets.records

    @property
    def world(self) -> World:
        """The ranks that each have a state of their own: all of the mesh."""
        return current() if self._whole else self.buckets.world

    def joined(self, group: dist.ProcessGroup) -> Transport:
        """The transport for the ranks of `group`; without a world of the user's own, one on these ranks."""
        if not self.buckets.has_world:
            self.buckets.world = current() if group.size() == dist.get_world_size() else world_of(group)
        world = self.buckets.world
        if world.world_size != group.size():
            raise BadInput(f"the world has {world.world_size} ranks, the reduce-scatter's group {group.size()}")
        return world.transport

    def send(self, work: Callable[[], Pausing[Any]], ready: Callable[[], Any] | None = None, *, later: bool) -> None:
        """Run an exchange on the exchange thread, after `ready`; wait for it now or, if `later`, when backward ends."""
        task = torch._C._current_graph_task_id()
        if not later or task != self._backward:  # what an earlier backward has left after an error comes first
            self.settle()
        wait = self.stream.start(work, ready)
        if not later:
            return wait()
        while len(self._under_way) >= DEPTH:  # each holds gradients of whole parameters in memory
            self._under_way.popleft()()
        self._under_way.append(wait)
        if task != self._backward:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        return None

    def fail(self, error: Exception) -> None:
        """Let backward end in this error."""
        self.stream.fail(error)
        self._under_way.append(self.stream.raise_first)
        torch.autograd.Variable._execution_engine.queue_callback(self.settle)

    def settle(self) -> None:
        """Wait for all that is under way; torch calls it when backward ends."""
        self._backward = -1
        try:
            while self._under_way:
                self._under_way.popleft()()
        finally:
            self._under_way.clear()

    def explain(self) -> str:
        """How gradients travel, by group of parameters, and weights."""
        world = self.buckets.world
        share = 1.0 if self.replicas else 0.5
        sent = bucket_table(list(self.records), world.rank, world.world_size, of_all_reduce=share)
        if not self.gathers:
            return sent
        gathered = bucket_table(list(self.gathered), world.rank, world.world_size, of_all_reduce=0.5)
        return f"gradients\n{sent}\n\nweights\n{gathered}"

    def metrics(self) -> dict[str, float | str]:
        """As `Job.metrics`, and `gathered_nbytes`, what the last step's gathers of weights sent through a codec."""
        found = super().metrics()
        if self.gathers and found:
            last = [record.sent_nbytes for record in list(self.gathered) if record.step == found["step"]]
            found["gathered_nbytes"] = sum(last)
        return found

    def _left_out(self) -> dict[str, float | str]:
        return self.buckets.losses()

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's residual of each whole parameter, in the form of `CompressionState.state_dict`.

        `merge_state_dicts` makes it that of another number of ranks; DDP's may be loaded as well. On a 2-D mesh
        residuals are of shards, and fit the same mesh only.
        """
        step = max((each.step for each in self._reducing), default=0)
        kept = {str(gather.index): row for gather in self.gathers if (row := gather.own_row()) is not None}
        state = {"step": step, **self.buckets.state_dict(), **({"weights": kept} if kept else {})}
        return owned(state, self.world.rank, self.world.world_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = state.get("weights", {}) if isinstance(state, Mapping) else {}
        self.buckets.check_state(state, self.world)
        for gather in self.gathers:
            gather.check_row(kept.get(str(gather.index)))
        self.buckets.load_state_dict(state)
        for each in self._reducing:
            each.restore(int(state["step"]))
        for gather in self.gathers:
            gather.restore(int(state["step"]), kept.get(str(gather.index)))

    def finish(self) -> None:
        """Raise the last exchange's error, if any."""
        self.stream.raise_first()

    def close(self) -> None:
        """Leave the exchange thread; gradients are reduced by torch from now on. Safe to call twice."""
        self.closed = True
        for replica in self.replicas:
            replica.remove()
        self.stream.close()


def _mesh_size(model: nn.Module) -> int:
    """How many ranks share or copy the model."""
    meshes = [mesh for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None]
    return meshes[0].size() if meshes else 0
