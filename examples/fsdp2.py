"""Compress the reduce-scatter of a model under FSDP2 with one line, and compare the bytes with float32's.

torchrun --nproc-per-node=2 examples/fsdp2.py [CODEC]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic


def main(codec: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    job = laconic.compress(model, codec)  # the one line
    optimizer = torch.optim.Adam(model.parameters(), 0.01)  # after fully_shard, as always

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(512, 64, generator=generator)
    y = x[:, :10].argmax(1)
    for _ in range(100):
        rows = torch.randint(0, 512, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

    accuracy = (model(x).argmax(1) == y).float().mean().item()
    sent_nbytes = sum(record.sent_nbytes for record in job.records)
    dense_nbytes = sum(4 * record.numel * (size - 1) // size for record in job.records)
    print(f"rank {rank}: {accuracy:.1%} of the training set; sent {sent_nbytes} bytes of {dense_nbytes} in float32")
    assert accuracy > 0.9
    job.close()
    laconic.init().close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["dynamic8"]))
