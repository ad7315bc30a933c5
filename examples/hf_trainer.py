"""Compress the gradients of a Hugging Face Trainer, interrupt it, resume from its checkpoint, and compare the weights.

torchrun --nproc-per-node=2 examples/hf_trainer.py [CODEC]      needs: pip install transformers accelerate
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from laconic.integrations.transformers import LaconicCallback


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
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[LaconicCallback(codec)])
    trainer.train(resume_from_checkpoint=checkpoint)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main(codec: str) -> None:
    arguments = TrainingArguments(output_dir=".", use_cpu=True)  # joins the other ranks
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    train(f"{folder[0]}/stopped", codec, 10)
    resumed = train(f"{folder[0]}/stopped", codec, 20, f"{folder[0]}/stopped/checkpoint-10")
    whole = train(f"{folder[0]}/whole", codec, 20)
    print(f"rank {arguments.process_index}: resumed to the bit: {torch.equal(whole, resumed)}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["topk(0.05)+qsgd(4)"]))
