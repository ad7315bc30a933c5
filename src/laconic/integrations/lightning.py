"""Lightning: `Trainer(strategy="ddp", callbacks=[LaconicCallback("dynamic8")])`, or `Fabric` with `setup`.

The callback compresses the DDP model that the strategy has made, and its state is in Lightning's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput, MissingExtra
from laconic.exchange.job import Job
from laconic.exchange.shared_state import SharedState
from laconic.integrations.doors import Door, check_door, metrics_of, open_door

try:
    from lightning import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingExtra("lightning", "lightning") from error


class LaconicCallback(Callback):
    """Send gradients of a Lightning training through a codec.

    Alone it does nothing. A strategy other than DDP or FSDP2 is refused when the training starts.

    Args:
        codec: as for `laconic.compress`.
        door: "compress", or "distribute", which also hides what is sent under the next forward.
        every: how many steps apart metrics are logged, where there is a logger.
        options: of the door, such as `exempt=` or `momentum=`.

    Attributes:
        job: what the door returned, while the training lasts.
    """

    def __init__(self, codec: Any = None, *, door: Door = "compress", every: int = 50, **options: Any) -> None:
        check_door(door)
        self.codec, self._door, self._every, self._options = codec, door, every, options
        self.job: Job | None = None
        self._loaded: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compress what the strategy has wrapped, and go on from the checkpoint."""
        if trainer.world_size == 1:
            return
        if len(trainer.optimizers) != 1 and self._door == "distribute":
            raise BadInput(f"distribute takes one optimiser, and this module has {len(trainer.optimizers)}")
        model, optimizer = trainer.strategy.model, trainer.optimizers[0] if trainer.optimizers else None
        if model is None:
            raise BadInput(f"the strategy {type(trainer.strategy).__name__} has no model to compress")
        self.job = open_door(self._door, model, optimizer, self.codec, self._options)
        loaded, self._loaded = self._loaded, None  # for this training, not for one that follows it
        if loaded:
            SharedState(self.job).load_state_dict(loaded)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log what was sent and waited for."""
        if self.job is not None and trainer.loggers and trainer.global_step % self._every == 0:
            pl_module.log_dict(metrics_of(self.job), rank_zero_only=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the model as trained."""
        if self.job is not None:
            self.job.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Train alone again."""
        if self.job is not None and stage == "fit":
            self.job.close()

    def state_dict(self) -> dict[str, Any]:
        """The residuals of all ranks; Lightning calls this on all, and rank 0 writes."""
        return {} if self.job is None else SharedState(self.job).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep them until there is a job."""
        self._loaded = state_dict


def compress_fabric(model: nn.Module, codec: Any = None, **options: Any) -> Job:
    """Compress a model that `fabric.setup` has returned; the job is `laconic.compress`'s.

    Keep its state by `fabric.save(path, {…, "laconic": laconic.SharedState(job)})`.

    Raises:
        BadInput: Fabric has not wrapped it in DDP: it trains alone, or by another strategy.
    """
    inner = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if inner is None:
        raise BadInput("Fabric has not wrapped this model in DDP; use strategy='ddp' and two devices or more")
    return open_door("compress", inner, None, codec, options)
