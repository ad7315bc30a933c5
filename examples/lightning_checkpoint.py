"""Compress the gradients of a Lightning training, interrupt it, resume from its checkpoint, and compare the weights.

python examples/lightning_checkpoint.py [CODEC]      (Lightning starts the second process itself)
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic


class Compress(lightning.Callback):
    """Gradients go through the codec from the first step on; the residuals of all ranks are in the checkpoint."""

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.job = laconic.compress(trainer.strategy.model, self.codec)
        if self.loaded is not None:
            laconic.SharedState(self.job).load_state_dict(self.loaded)

    def state_dict(self) -> dict[str, Any]:
        return laconic.SharedState(self.job).state_dict()  # Lightning calls it on all ranks, and rank 0 writes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.job.finish()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def fit(epochs: int, codec: str, checkpoint: Path | None = None) -> tuple[lightning.Trainer, torch.Tensor]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=2, strategy="ddp", callbacks=[Compress(codec)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, 16), ckpt_path=checkpoint)
    return trainer, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main(codec: str) -> None:
    trainer, _ = fit(2, codec)
    folder = Path(trainer.strategy.broadcast(tempfile.mkdtemp()))  # the same for both processes
    trainer.save_checkpoint(folder / "two-epochs.ckpt")
    _, whole = fit(4, codec)
    trainer, resumed = fit(4, codec, folder / "two-epochs.ckpt")
    print(f"rank {trainer.global_rank}: resumed to the bit: {torch.equal(whole, resumed)}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["topk(0.05)"]))
