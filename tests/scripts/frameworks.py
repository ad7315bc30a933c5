"""The same for scripts whose loop is a framework's: Accelerate, the Hugging Face Trainer, Lightning."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.idioms import STEPS
from tests.scripts.ways import Run


def accelerate(run: Run) -> None:
    """`prepare`, `accumulate`, `clip_grad_norm_` and a scheduler."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = DataLoader(TensorDataset(*_samples()), 8)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    run.join(model, optimizer)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.step(loss)


def trainer(run: Run) -> None:
    """A callback that gets model and optimiser from the Trainer: the model is the one inside DDP."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Join(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            outside = run.way.startswith("compress")
            run.join(loop.model_wrapped if outside else given["model"], given["optimizer"])

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs:
                run.step(logs["loss"])

    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, **_NO_DROPOUT))
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, seed=0,
        gradient_accumulation_steps=2, max_grad_norm=100.0, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", ddp_find_unused_parameters=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    loop = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Join()])
    loop.train()


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def lightning(run: Run) -> None:
    """bf16-mixed and gradient_clip_val together."""
    import lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            run.step(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    class Join(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
            run.join(trainer.strategy.model, trainer.optimizers[0])

    warnings.simplefilter("ignore")
    loop = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed", gradient_clip_val=100.0,
        max_steps=STEPS, callbacks=[Join()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loop.fit(Classifier(), DataLoader(TensorDataset(*_samples()), 8))


def _samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(16 * STEPS, 32, generator=draw), torch.randint(8, (16 * STEPS,), generator=draw)
