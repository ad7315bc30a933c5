"""A script that goes on without a rank, as one types it: no logging, nothing closed. Run by `test_lost_rank.py`.

python lost_rank_program.py MODE, under the variables that torchrun sets: the last rank kills itself in step 5.
"""

import os
import signal
import sys
import time

import torch

import laconic

world = laconic.init(timeout_s=20)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
job = laconic.distribute(model, optimizer, consistency=sys.argv[1])
step = 0
while step < 10 or not job.lost_ranks:
    if step == 5 and world.rank == world.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    time.sleep(0.02)
