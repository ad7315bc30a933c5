"""An ordinary DDP loop with a scheduler, clipping and torch.save, compressed, stopped and resumed to the bit.

torchrun --nproc-per-node=2 examples/ddp_checkpoint.py      (or just python …; not under mpiexec)
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic


class Training:
    """Model, optimiser and scheduler, as you have them, and the job that compresses what they exchange."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.job = laconic.compress(self.ddp, "topk(0.05)+qsgd(4)")  # the one line

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            x, y = torch.randn(16, 64, generator=generator), torch.randint(10, (16,), generator=generator)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(x), y).backward()
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)  # the gradients are the averaged ones here
            self.optimizer.step()
            self.scheduler.step()

    def save(self, path: Path) -> None:
        kept = laconic.SharedState(self.job).state_dict()  # on all ranks: each has residuals of its own
        if dist.get_rank() == 0:
            state = {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict(),
                     "scheduler": self.scheduler.state_dict(), "laconic": kept}  # fmt: skip
            torch.save(state, path)
        dist.barrier()

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.ddp.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        laconic.SharedState(self.job).load_state_dict(state["laconic"])

    def weights(self) -> torch.Tensor:
        self.job.close()
        return torch.cat([p.detach().reshape(-1) for p in self.ddp.parameters()])


def main(folder: str) -> bool:
    """Whether a training that was interrupted ends as one that was not."""
    whole, path = Training(), Path(folder) / "checkpoint.pt"
    whole.train(range(10))
    whole.save(path)
    whole.train(range(10, 20))
    resumed = Training()
    resumed.load(path)
    resumed.train(range(10, 20))
    return torch.equal(whole.weights(), resumed.weights())


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # alone
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    print(f"rank {dist.get_rank()}: resumed to the bit: {main(folder[0])}")
    laconic.init().close()
    dist.destroy_process_group()
