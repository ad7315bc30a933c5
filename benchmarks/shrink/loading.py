"""Load a `.lac` file into a network and say how long that took and how much memory: a process of its own.

Caller: `vgg16.py`, as `python -m benchmarks.shrink.loading FILE NETWORK never|always THREADS`. What the
process takes before the network is there is not counted: interpreter, torch, and the kernels, which a small file loads.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.shrinking.door import load_shrunk, shrink
from laconic.workloads import models
from laconic_lab.bench.resident import begin_peak, peak_nbytes


def measure(path: str, network: str, sparse: Any, threads: int) -> dict[str, Any]:
    """Seconds, of the clock and of all threads together, and the peak of memory beside the dense network's bytes."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        shrink(nn.Linear(3, 3)).save(Path(folder) / "small.lac")
        load_shrunk(Path(folder) / "small.lac", into=nn.Sequential(nn.Linear(3, 3))[0])
    with torch.device("meta"):
        model = models.build(network)
    dense = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    before = begin_peak()
    start, worked = time.perf_counter(), time.process_time()
    load_shrunk(path, into=model, sparse=sparse)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    peak = peak_nbytes() - before
    return {"network": network, "sparse": sparse, "threads": threads, "load_s": seconds, "load_cpu_s": worked,
            "dense_nbytes": dense, "peak_nbytes": peak, "peak_over_dense": peak / dense}  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
