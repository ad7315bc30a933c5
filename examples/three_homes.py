"""Train on digits from several homes, which reach one machine and not each other.

    laconic join --relay meet.example.org:29601 tcp://meet.example.org:29600/digits train.py 3

`laconic join` names the meeting place; 3 is how many workers the first step waits for. Each worker that is there at the
end has the same model, and saves it. docs/guides/elastic.md, "Three machines at three homes", has the other steps.
"""

import os
import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import laconic

workers = int(sys.argv[1]) if len(sys.argv) > 1 else 1
meeting = os.environ.get("LACONIC_MEETING") or tempfile.mkdtemp()
torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = laconic.Samples(len(x), batch=96, epochs=20)
with laconic.elastic(
    model, optimizer, data, meeting, consistency="diloco(19)", workers=workers, patience_s=60.0
) as job:  # a block is an epoch
    for batch in job.batches():
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        job.step()
    if job.finished:
        torch.save(model.state_dict(), "model.pt")
        accuracy = (model(x).argmax(1) == y).float().mean()
        print(f"worker {job.worker}: {job.steps} steps, {accuracy:.1%} of the training set, weights {job.digest:08x}")
