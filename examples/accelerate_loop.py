"""Compress the gradients of an Accelerate loop, interrupt it, resume from its checkpoint, and compare the weights.

torchrun --nproc-per-node=2 examples/accelerate_loop.py [CODEC]      needs: pip install accelerate
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic
from laconic.integrations.accelerate import accelerated


def train(codec: str, epochs: range, load: str | None = None, save: str | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), 0.01), DataLoader(data, 16)
    )
    with accelerated(accelerator, model, codec):  # save_state keeps the residuals of all ranks
        if load:
            accelerator.load_state(load)
        for _ in epochs:
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        if save:
            accelerator.save_state(save)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main(codec: str) -> None:
    rank = Accelerator(cpu=True).process_index
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    train(codec, range(2), save=folder[0])
    resumed = train(codec, range(2, 4), load=folder[0])
    print(f"rank {rank}: resumed to the bit: {torch.equal(resumed, train(codec, range(4)))}")
    laconic.init().close()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["topk(0.05)+qsgd(4)"]))
