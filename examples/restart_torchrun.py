"""Train digits with checkpoints; when a worker dies, torchrun restarts all and training continues, bit for bit.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node=2 --max-restarts=2 \
    --rdzv-backend=c10d --rdzv-endpoint=localhost:0 examples/restart_torchrun.py --die-at 70

Without that variable, the restarted workers of torch 2.x meet in the store of the first ones, which still holds their
entries, and a restart takes 45 s or never ends.
"""

import argparse
import hashlib
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn

import laconic

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="restart-checkpoints")
parser.add_argument("--die-at", type=int, help="the last worker kills itself here, once")
arguments = parser.parse_args()

world = laconic.init()
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
laconic.distribute(model, optimizer, codec="topk(0.1)")
cursor = laconic.exchange.Cursor(1500, batch=64)

with laconic.Checkpoints(arguments.folder) as checkpoints:
    found = checkpoints.restore(model=model, optimizer=optimizer, cursor=cursor)
    if found is not None and world.rank == 0:
        print(f"resumed at step {found.step}")
    for step in range(found.step if found else 0, 120):
        rows = next(cursor)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows].float() / 16), labels[rows]).backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            checkpoints.save(step + 1, model=model, optimizer=optimizer, cursor=cursor)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if step + 1 == arguments.die_at and first and world.rank == world.world_size - 1:
            checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)

if world.rank == 0:
    model.eval()
    right = (model(images[1500:].float() / 16).argmax(1) == labels[1500:]).float().mean().item()
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"{right:.1%} of the test digits right")
    print(f"weights {hashlib.sha256(bits).hexdigest()[:16]}")
world.close()
