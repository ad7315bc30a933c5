"""Sum a tensor over all ranks, with a chosen algorithm and with the cheapest one.

torchrun --nproc-per-node=4 examples/all_reduce.py      (or mpiexec -n 4 python …, or just python …)
"""

import torch

import laconic

world = laconic.init(timeout_s=60)
gradient = torch.full((1000,), world.rank + 1.0)
laconic.all_reduce(gradient, algorithm="rabenseifner")
laconic.all_reduce(gradient, "mean")
if world.rank == 0:
    sent = world.transport.counters.total_sent_nbytes
    print(f"{world.world_size} ranks on {world.engine}: {gradient[0]:g} everywhere, rank 0 sent {sent} bytes")
world.close()
