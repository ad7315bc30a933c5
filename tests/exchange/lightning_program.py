"""A Lightning script as a user writes it; `test_lightning.py` runs it, and Lightning starts its second process itself.

python lightning_program.py FOLDER strategy|callback: every rank leaves a report in FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic


class Digits(lightning.LightningModule):
    """A small classifier that keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


class AlsoOnCpu(DDPStrategy):
    """DDPStrategy without its condition that communication hooks are for CUDA: the rest is Lightning's own."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


class Compress(lightning.Callback):
    """The way that works on any device."""

    def on_train_start(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        self.state = laconic.compress(trainer.strategy.model, "topk(0.1)")


def main(folder: Path, way: str) -> None:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    lightning.seed_everything(0)
    model = Digits()
    state, callback, strategy = None, Compress(), DDPStrategy()
    if way == "strategy":
        state = laconic.exchange.CompressionState("topk(0.1)", model.named_parameters())
        strategy = AlsoOnCpu(ddp_comm_state=state, ddp_comm_hook=laconic.exchange.ddp.hook)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[] if way == "strategy" else [callback],
        max_steps=40,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    state = state or callback.state
    report = {
        "losses": model.losses,
        "world_size": state.world.world_size,
        "sent_nbytes": sum(record.sent_nbytes for record in state.records),
        "residuals": sorted(name.removeprefix("module.") for name in state.state_dict()["residuals"]),
        "weights": [p.detach().reshape(-1).tolist() for p in model.parameters()],
    }
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(report))
    state.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
