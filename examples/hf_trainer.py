"""Compress the gradients of a Hugging Face Trainer, interrupt it, resume from its checkpoint, and compare the weights.

torchrun --nproc-per-node=2 examples/hf_trainer.py [CODEC]      needs: pip install transformers accelerate
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import laconic


class Compress(TrainerCallback):
    """Gradients go through the codec from the first step on; the residuals of all ranks are in each checkpoint."""

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.trainer: Trainer | None = None  # set once there is one: callbacks are not told of it
        self.checkpoint: str | None = None  # to resume from

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.job = laconic.compress(self.trainer.model_wrapped, self.codec)
        if self.checkpoint:
            kept = torch.load(Path(self.checkpoint) / "laconic.pt", weights_only=True)
            laconic.SharedState(self.job).load_state_dict(kept)

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        kept = laconic.SharedState(self.job).state_dict()  # on all ranks
        if state.is_world_process_zero:
            torch.save(kept, Path(args.output_dir) / f"checkpoint-{state.global_step}" / "laconic.pt")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.job.close()


def train(folder: str, codec: str, steps: int, checkpoint: str | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (256, 32))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    shape = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=10, per_device_train_batch_size=8, use_cpu=True, seed=0,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, logging_strategy="no",
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    callback = Compress(codec)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
    callback.trainer, callback.checkpoint = trainer, checkpoint
    trainer.train(resume_from_checkpoint=checkpoint)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main(codec: str) -> None:
    arguments = TrainingArguments(output_dir=".", use_cpu=True)  # joins the other ranks
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    train(f"{folder[0]}/first", codec, 10)
    resumed = train(f"{folder[0]}/resumed", codec, 20, f"{folder[0]}/first/checkpoint-10")
    whole = train(f"{folder[0]}/whole", codec, 20)
    print(f"rank {arguments.process_index}: resumed to the bit: {torch.equal(whole, resumed)}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["topk(0.05)+qsgd(4)"]))
