"""Hugging Face Trainer: `Trainer(…, callbacks=[LaconicCallback("dynamic8")])`.

The Trainer makes the DDP or FSDP2 model itself; the callback compresses that, keeps the residuals of all ranks in every
checkpoint, goes on from them, and adds what was sent to the Trainer's own logs.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic.errors import BadInput, MissingExtra
from laconic.exchange.job import Job
from laconic.integrations.doors import Door, check_door, load_state, metrics_of, open_door, save_state

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingExtra("transformers", "huggingface") from error


class LaconicCallback(TrainerCallback):
    """Send gradients of a Trainer through a codec.

    Alone, without other ranks, it does nothing but warn.

    Args:
        codec: as for `laconic.compress`.
        door: "compress", or "distribute", which also hides what is sent under the next forward.
        checkpoint: the folder to resume residuals from, where it is neither `output_dir/checkpoint-STEP` nor
            `TrainingArguments.resume_from_checkpoint`.
        options: of the door, such as `exempt=` or `momentum=`.

    Attributes:
        job: what the door returned, while the training lasts.

    >>> str(LaconicCallback("topk(0.01)").codec)
    'topk(0.01)'
    """

    def __init__(
        self, codec: Any = None, *, door: Door = "compress", checkpoint: str | Path | None = None, **options: Any
    ) -> None:
        check_door(door)
        self.codec, self._door, self._options = codec, door, options
        self._checkpoint = checkpoint
        self.job: Job | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **made: Any
    ) -> None:
        """Compress what the Trainer has wrapped, and go on from its checkpoint."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            warnings.warn("this Trainer has one process: nothing is sent, so nothing is compressed", stacklevel=2)
            return
        self._close()  # of a training that ended in an exception, of which the Trainer tells nobody
        trainer = self._trainer()
        others = [each for each in trainer.callback_handler.callbacks if each is not self]
        trainer.callback_handler.callbacks[:] = [self, *others]  # first, so that loggers see what it adds
        self.job = open_door(self._door, trainer.model_wrapped, made.get("optimizer"), self.codec, self._options)
        if state.global_step:
            named = (self._checkpoint, args.resume_from_checkpoint, f"{args.output_dir}/checkpoint-{state.global_step}")
            load_state(self.job, [folder for folder in named if isinstance(folder, str | Path)])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep the residuals beside the Trainer's own files."""
        if self.job is not None:
            folder = f"{args.output_dir}/checkpoint-{state.global_step}"
            save_state(self.job, folder, writes=state.is_world_process_zero)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, Any] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """Add what was sent and waited for to the Trainer's log."""
        if self.job is not None and logs is not None:
            found = metrics_of(self.job)
            logs.update(found)
            if state.log_history:
                state.log_history[-1].update(found)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the model as trained, and train alone again."""
        if self.job is not None:
            self.job.finish()
            self._close()

    def _close(self) -> None:
        job, self.job = self.job, None
        if job is not None:
            job.close()

    def _trainer(self) -> Trainer:
        """The Trainer that calls this: it tells callbacks neither of itself nor of the model it has wrapped."""
        frame = sys._getframe()
        while (caller := frame.f_back) is not None:
            frame, found = caller, caller.f_locals.get("self")
            if isinstance(found, Trainer) and self in found.callback_handler.callbacks:
                return found
        raise BadInput("this callback belongs to no Trainer; give it as Trainer(callbacks=[…]) or by add_callback")
