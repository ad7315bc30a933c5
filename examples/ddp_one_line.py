"""Train a digit classifier with DDP, compress its gradients with one line, and compare the bytes with float32's.

torchrun --nproc-per-node=2 examples/ddp_one_line.py      (or just python …; not under mpiexec)
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:  # alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, size = dist.get_rank(), dist.get_world_size()

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
torch.manual_seed(0)
order = torch.randperm(len(labels))
images, labels = images[order].float() / 16, labels[order]
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
job = laconic.compress(ddp)  # the one line: 8 bits a value

optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
sent_nbytes = dense_nbytes = 0
for step in range(150):
    rows = torch.randint(0, 1500, (64,), generator=torch.Generator().manual_seed(step * size + rank))
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(images[rows]), labels[rows]).backward()
    optimizer.step()
    for record in (record for record in job.records if record.step == step):
        sent_nbytes += record.sent_nbytes
        dense_nbytes += 2 * (size - 1) * 4 * record.numel // size  # what a float32 ring sends

accuracy = (ddp(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
if rank == 0:
    print(f"{size} ranks: {accuracy:.1%} of the test digits right; each rank sent {sent_nbytes / 1e6:.2f} MB", end=" ")
    print(f"instead of float32's {dense_nbytes / 1e6:.2f} MB")
job.close()
dist.destroy_process_group()
