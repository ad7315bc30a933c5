"""The lasting state of a compressed exchange of gradients, and the job that `compress` returns for DDP.

Callers: `compress`, the DDP hook and `consistency`. Everything is kept by parameter name, since DDP rebuilds its
buckets after the first step, codecs change mid-run, and checkpoints are restored into other world sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs.plans import CodecPlan
from laconic.errors import BadInput
from laconic.exchange.buckets import BucketExchange, no_sparse_momentum
from laconic.exchange.chooser import AutoCodec, choice_for
from laconic.exchange.ddp import DdpGradients
from laconic.exchange.former import FormerBuckets, check_buckets
from laconic.exchange.job import BucketRecord, Job, LayerForm, bucket_table, last_step_beside_ddp, layer_table
from laconic.exchange.layout import Parameters
from laconic.exchange.options import DEFAULT_CODEC, Options
from laconic.exchange.ownership import owned
from laconic.exchange.residuals import Wrapper
from laconic.exchange.stream import GradientStream
from laconic.transports.world import World

if TYPE_CHECKING:
    from laconic.exchange.reported_loss import ReportedLoss


class CompressionState(Job):
    """The exchange of one model's gradients: what `compress` returns for DDP, and what a hook by hand takes.

    Args:
        codec: as for `compress`; None is DEFAULT_CODEC.
        named_parameters: the model's, so that state is kept by name through DDP's rebuilding of buckets.

    Attributes:
        buckets: averages a step's buckets: codec, exemptions, residuals, momentum.
        stream: brings them there during training.

    >>> model = nn.Linear(64, 64)
    >>> state = CompressionState("topk(0.01)", model.named_parameters())
    >>> # ddp.register_comm_hook(state, laconic.exchange.ddp.hook)
    >>> state.step
    0
    """

    def __init__(
        self,
        codec: CodecPlan | None = None,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        options: Options | None = None,
    ) -> None:
        options = options or Options()
        choice = choice_for(DEFAULT_CODEC if codec is None else codec, options.quality, options.feedback)
        named = list(named_parameters or ())
        if options.feedback_decay is not None and (matrix := choice.matrix_codec()):
            raise BadInput(f"feedback_decay goes with codecs for flat gradients, not with '{matrix}'")
        wrappers = list[Wrapper]()
        if options.momentum is not None:
            from laconic.exchange.dgc import correction_for, refuse_second_momentum

            wrappers.append(correction_for(options.momentum, options.algorithm, options.feedback, named=bool(named)))
            if choice.weighs_noise:
                raise BadInput("quality 'noise' measures gradients as they are made; leave momentum to the optimiser")
            if matrix := choice.matrix_codec():
                raise BadInput(f"momentum goes with codecs for flat gradients, not with '{matrix}'")
        self.buckets = BucketExchange(choice, Parameters(named, options.exemptions), options, wrappers)
        self.stream = GradientStream(self.buckets)
        self.sink: DdpGradients | None = None  # of the model that `stream_from` was called for
        self.closed = False
        self.successor: CompressionState | None = None  # of a closed job whose model was compressed again
        self.group: dist.ProcessGroup | None = None  # DDP's, which its own all-reduce takes after `close`
        self._why_whole = ""
        self.resources = ExitStack()  # what `close` gives back, the last first
        self.resources.callback(self.buckets.matrices.close)
        self.resources.callback(self.stream.close)
        if wrappers:
            self.resources.callback(refuse_second_momentum(p for _, p in named).remove)

    @property
    def records(self) -> deque[BucketRecord]:  # type: ignore[override]  # may be taken out
        return self.buckets.records

    @property
    def step(self) -> int:
        """The step that is under way, or comes next."""
        return self.buckets.step

    @property
    def world(self) -> World:
        """Where to communicate."""
        return self.buckets.world

    @property
    def auto(self) -> AutoCodec | None:
        """The chooser, if the codec is "auto"."""
        return self.buckets.auto

    @property
    def layers(self) -> list[LayerForm]:
        """How each parameter of a matrix codec's buckets travels, and what this rank sends for it at a step."""
        return self.buckets.layers

    def _left_out(self) -> dict[str, float | str]:
        return self.buckets.losses()

    def _reported_losses(self) -> list[ReportedLoss]:
        return [] if self.buckets.noise is None else [self.buckets.noise.loss]

    def observe(self, model: nn.Module) -> None:
        """Let the planned matrix codecs watch this model, if they need more than gradients.

        Raises:
            BadInput: a layer's gradients are sparse, and there is momentum, which is kept for dense ones.
        """
        for module in model.modules() if self.buckets.dense else ():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise no_sparse_momentum(self.buckets.parameters.names[id(module.weight)])
        for name in filter(self.buckets.choice.names, self.buckets.matrices.names()):
            self.buckets.matrices.of(name).observe(model, self.buckets.parameters.names)

    def stream_from(self, ddp: DistributedDataParallel, why_whole: str) -> None:
        """Send gradients as backward makes them, or, where there is a reason, in DDP's buckets."""
        self._why_whole = why_whole
        if not why_whole:
            self.sink = DdpGradients(ddp, self.buckets, self.stream)
            self.resources.callback(self.sink.close)

    def explain(self, hidden: str = "") -> str:
        """How the gradients travel, by bucket, why where the codec is "auto", and by layer for matrix codecs.

        `hidden`: the driver's text about what overlaps.
        """
        total = last_step_beside_ddp(list(self.records), self.world.world_size)
        choice = self.buckets.choice.table()
        buckets = bucket_table(list(self.records), self.world.rank, self.world.world_size)
        whole = f"gradients are sent in DDP's buckets: {self._why_whole}" if self._why_whole else ""
        sent = "gradients are sent as backward makes them" if self.sink is not None else whole
        return "\n\n".join(part for part in (total, hidden, sent, choice, buckets, layer_table(self.layers)) if part)

    def state_dict(self) -> dict[str, Any]:
        """The step, this rank's residuals and its momentum, by parameter name, and which parameters share a bucket.

        Survives new buckets, codecs and, through `merge_state_dicts`, world sizes.
        """
        state = {"step": self.step, "warm": self.buckets.matrices.state_dict(), **self.buckets.state_dict()}
        known = self.buckets.parameters
        if known.known is not None and self.sink is None and known.buckets:
            state["buckets"] = known.buckets
        return owned(state, self.world.rank, self.world.world_size)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` could not load whole."""
        self.buckets.check_state(state)
        self.buckets.matrices.check_state(state.get("warm", {}))
        check_buckets(state.get("buckets", []), self.buckets.parameters.known)
        if state.get("velocity") and not self.buckets.dense:
            raise BadInput("the state holds momentum, and this one has none: give momentum=…, or leave it out there")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self.buckets.load_state_dict(state, resumed=True)
        self.buckets.matrices.load_state_dict(state.get("warm", {}))
        former = state.get("buckets", [])
        self.buckets.parameters.restore(former)
        self.stream.restart(FormerBuckets(former, self.buckets.parameters.names) if former else None)

    def finish(self) -> None:
        """Raise the last exchange's error, if any; the model is the same on all ranks anyway."""
        self.stream.raise_first()

    def close(self) -> None:
        """Join the exchange thread, and let DDP average gradients itself from now on; safe to call twice."""
        self.closed = True
        self.resources.close()
