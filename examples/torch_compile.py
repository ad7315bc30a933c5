"""Train a compiled model through `distribute` and through DDP with `compress`, and compare the losses.

torchrun --nproc-per-node=2 examples/torch_compile.py [CODEC]      needs a C++ compiler, as torch.compile does
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic


def train(codec: str, *, by_ddp: bool) -> float:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model.compile()
    job: laconic.Job
    if by_ddp:
        model = DistributedDataParallel(model)
        job = laconic.compress(model, codec)
    else:
        job = laconic.distribute(model, optimizer, codec=codec)
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss = torch.zeros(())
    for _ in range(60):
        x = torch.randn(64, 64, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
    job.finish()
    job.close()
    return loss.item()


def main(codec: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # alone
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    by_ddp, distributed = train(codec, by_ddp=True), train(codec, by_ddp=False)
    print(f"rank {dist.get_rank()}: loss {by_ddp:.3f} by compress, {distributed:.3f} by distribute")
    assert max(by_ddp, distributed) < 1.5
    laconic.init().close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["dynamic8"]))
