"""Distributed L-BFGS, as DistBelief's Sandblaster: a full batch, each worker its part, one line search for all.

torchrun --nproc-per-node=2 examples/lbfgs_digits.py      (or just python …)
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import laconic


def train(steps: int = 8) -> tuple[nn.Module, float]:
    """Logistic regression on the digits; returns the model and the share of test digits that it gets right."""
    world = laconic.init()
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    order = torch.randperm(len(labels))
    rows = order[:1440][world.rank :: world.world_size]  # this worker's part of the batch
    model = nn.Linear(64, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    job = laconic.distribute(model, optimizer, codec="none")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss = loss + 1e-3 * model.weight.square().sum()
        loss.backward()
        return loss  # optimizer.step() sees the mean over all workers, of this and of the gradients

    for _ in range(steps):
        optimizer.step(closure)
    job.finish()
    job.close()
    test = order[1440:]
    return model, (model(images[test]).argmax(1) == labels[test]).float().mean().item()


if __name__ == "__main__":
    _, accuracy = train()
    world = laconic.init()
    if world.rank == 0:
        print(f"{world.world_size} workers: {accuracy:.1%} of the test digits right after 8 steps of L-BFGS")
    world.close()
