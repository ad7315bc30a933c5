"""Lightning: `Trainer(strategy=LaconicStrategy("dynamic8"))`, `Fabric(strategy=LaconicFabricStrategy("dynamic8"))`.

The strategies are Lightning's DDP with gradients through a codec; `LaconicCallback("dynamic8")` does the same to a
strategy that makes a DDP or FSDP2 model. The job's state is in Lightning's checkpoints. Precision and clipping are
Lightning's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput, MissingExtra
from laconic.exchange.job import Job
from laconic.exchange.shared_state import SharedState
from laconic.integrations.doors import Door, check_door, metrics_of, open_door

try:
    from lightning import Callback, LightningModule, Trainer
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies.ddp import DDPStrategy
except ImportError as error:
    raise MissingExtra("lightning", "lightning") from error


class LaconicCallback(Callback):
    """Send gradients of a Lightning training through a codec.

    Alone it does nothing. A strategy other than DDP or FSDP2 is refused when the training starts.

    Args:
        codec: as for `laconic.compress`.
        door: "compress", or "distribute", which also hides what is sent under the next forward.
        every: how many steps apart metrics are logged, where there is a logger; default: the Trainer's own.
        options: of the door, such as `exempt=` or `momentum=`.

    Attributes:
        job: what the door returned, while the training lasts.
    """

    def __init__(self, codec: Any = None, *, door: Door = "compress", every: int | None = None, **options: Any) -> None:
        check_door(door)
        self.codec, self._door, self._every, self._options = codec, door, every, options
        self.job: Job | None = None
        self._loaded: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compress what the strategy has wrapped, and go on from the checkpoint."""
        if trainer.world_size == 1:
            return
        self.job = _opened(self._door, trainer.strategy.model, trainer.optimizers, self.codec, self._options)
        loaded, self._loaded = self._loaded, None  # for this training, not for one that follows it
        if loaded:
            SharedState(self.job).load_state_dict(loaded)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Train alone again; Lightning then leaves `teardown` out."""
        self.teardown(trainer, pl_module, "fit")
        self.job = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log what was sent and waited for."""
        _log(trainer, self.job, self._every)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the model as trained."""
        if self.job is not None:
            self.job.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Train alone again."""
        if self.job is not None and stage == "fit":
            self.job.close()  # its state may still be saved

    def state_dict(self) -> dict[str, Any]:
        """The residuals of all ranks; Lightning calls this on all, and rank 0 writes."""
        return {} if self.job is None else SharedState(self.job).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep them until there is a job."""
        self._loaded = state_dict


def _log(trainer: Trainer, job: Job | None, every: int | None = None) -> None:
    """Hand the job's metrics to the Trainer's loggers, every so many steps."""
    apart = every or getattr(trainer, "log_every_n_steps", 50) or 50
    if job is not None and trainer.global_step and trainer.global_step % apart == 0:
        for logger in trainer.loggers:
            logger.log_metrics(metrics_of(job), step=trainer.global_step)


def _opened(door: Door, model: nn.Module | None, optimizers: Sequence[Any], codec: Any, options: Any) -> Job:
    """The job of what a strategy has made."""
    if len(optimizers) != 1 and door == "distribute":
        raise BadInput(f"distribute takes one optimiser, and this module has {len(optimizers)}")
    if model is None:
        raise BadInput("this strategy has no model to compress")
    return open_door(door, model, optimizers[0] if optimizers else None, codec, options)


class LaconicStrategy(DDPStrategy):
    """Lightning's DDP for a Trainer, with gradients through a codec.

    Args:
        codec, door: as for `LaconicCallback`.
        options: of the door, such as {"exempt": ["head"]}.
        ddp: of Lightning's DDPStrategy, such as find_unused_parameters=True.

    Attributes:
        job: what the door returned, while the training lasts.
    """

    def __init__(
        self, codec: Any = None, *, door: Door = "compress", options: Mapping[str, Any] | None = None, **ddp: Any
    ) -> None:
        check_door(door)
        super().__init__(**ddp)
        self._asked, self._options = (codec, door), dict(options or {})
        self.job: Job | None = None
        self._loaded: Mapping[str, Any] | None = None

    def on_train_start(self) -> None:
        """Compress the DDP model, and go on from the checkpoint."""
        super().on_train_start()
        if self.world_size > 1:
            codec, door = self._asked
            self.job = _opened(door, self.model, self.optimizers, codec, self._options)
            loaded, self._loaded = self._loaded, None
            if loaded:
                SharedState(self.job).load_state_dict(loaded)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what the step before has sent and waited for, as often as the Trainer logs."""
        super().on_train_batch_start(batch, batch_idx)
        if self.job is not None and self.lightning_module is not None:
            _log(self.lightning_module.trainer, self.job)

    def on_train_end(self) -> None:
        """Leave the model as trained."""
        if self.job is not None:
            self.job.finish()
        super().on_train_end()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the residuals of all ranks, too."""
        if self.job is not None and "optimizer_states" in checkpoint:
            checkpoint["laconic"] = SharedState(self.job).state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *given: Any, **named: Any) -> dict[str, Any]:
        """Keep the residuals until there is a job."""
        found: dict[str, Any] = super().load_checkpoint(*given, **named)
        self._loaded = found.get("laconic")
        return found

    def teardown(self) -> None:
        """Train alone again; Lightning calls it after an exception, too."""
        if self.job is not None:
            self.job.close()  # its state may still be saved
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Train alone again."""
        super().on_exception(exception)
        job, self.job = self.job, None
        if job is not None:
            job.close()


class LaconicFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP with gradients through a codec; `fabric.save` and `fabric.load` keep the residuals of all ranks.

    Args:
        codec: as for `laconic.compress`.
        options: of `compress`, such as {"exempt": ["head"]}.
        ddp: of Fabric's DDPStrategy.

    Attributes:
        jobs: one for each model that was set up.
    """

    def __init__(self, codec: Any = None, *, options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._codec, self._options = codec, dict(options or {})
        self.jobs: list[Job] = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module in DDP, and compress it where there are other ranks."""
        wrapped = super().setup_module(module)
        if self.world_size > 1:
            self.jobs.append(open_door("compress", wrapped, None, self._codec, self._options))
        return wrapped

    def save_checkpoint(self, path: Any, state: dict[str, Any], *given: Any, **named: Any) -> None:
        """Save the residuals of all ranks, too; called by all."""
        kept = [SharedState(job).state_dict() for job in self.jobs]
        super().save_checkpoint(path, {**state, "laconic": kept}, *given, **named)

    def load_checkpoint(self, path: Any, state: Any = None, *given: Any, **named: Any) -> dict[str, Any]:
        """Load them, where the checkpoint has them."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, *given, **named)
        kept = rest.pop("laconic", []) if state else []
        for job, one in zip(self.jobs, kept, strict=False):
            SharedState(job).load_state_dict(one)
        return rest


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
