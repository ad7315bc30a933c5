"""Compress the gradients of a Lightning training, interrupt it, resume from its checkpoint, and compare the weights.

python examples/lightning_checkpoint.py [CODEC]      (Lightning starts the second process itself)
"""

import sys
import tempfile
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laconic.integrations.lightning import LaconicCallback


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
        max_epochs=epochs, accelerator="cpu", devices=2, strategy="ddp", callbacks=[LaconicCallback(codec)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
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
