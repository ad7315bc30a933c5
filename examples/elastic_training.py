"""Train on digits with workers that may come, go and die at any moment.

    python examples/elastic_training.py runs/digits &        as often and whenever you like
    kill -9 <any of them>                                    the others continue

torchrun --nproc-per-node=2 examples/elastic_training.py works, too.
A folder holds one training; name another one to repeat it.
"""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import laconic

folder = sys.argv[1] if len(sys.argv) > 1 else f"runs/elastic-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with laconic.elastic(model, optimizer, laconic.Samples(len(x), batch=64, epochs=10), f"{folder}/members") as job:
    print("the training is over" if job.is_over else f"worker {job.worker} has joined")
    for batch in job.batches():
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        job.step()
    if job.finished:
        accuracy = (model(x).argmax(1) == y).float().mean()
        print(f"worker {job.worker}: {job.steps} steps, {accuracy:.1%} of the training set, weights {job.digest:08x}")
