"""Save a distributed training with torch.distributed.checkpoint, build it anew, go on, and compare the weights.

torchrun --nproc-per-node=2 examples/dcp_checkpoint.py      (or just python …; not under mpiexec)
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import laconic


def build() -> tuple[nn.Module, torch.optim.Optimizer, laconic.Job]:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return model, optimizer, laconic.distribute(model, optimizer, codec="topk(0.05)")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randn(16, 64, generator=generator), torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, job: laconic.Job) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "job": laconic.SharedState(job)}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, job: laconic.Job) -> None:
    weights, moments = get_state_dict(model, optimizer)  # of a new optimiser: torch steps once, with learning rate 0
    shared = laconic.SharedState(job)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "job": shared.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    shared.load_state_dict(state["job"])  # last: from here on the job is as it was


def main(folder: str) -> bool:
    """Whether a training that was interrupted ends as one that was not."""
    model, optimizer, job = build()
    train(model, optimizer, range(10))
    save(folder, model, optimizer, job)
    train(model, optimizer, range(10, 20))
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    job.close()

    model, optimizer, job = build()
    load(folder, model, optimizer, job)
    train(model, optimizer, range(10, 20))
    resumed = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    job.close()
    return torch.equal(whole, resumed)


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
