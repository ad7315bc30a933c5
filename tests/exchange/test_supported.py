"""What the page "Supported and refused" says of DDP models, where no other test shows it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput
from laconic.transports.launcher import run_local

DTYPES = (torch.float64, torch.float16, torch.bfloat16)


def _error_of_the_mean(dtype: torch.dtype, **options: Any) -> float:
    """How far compressed gradients are from those of plain DDP, over the largest of them."""
    gradients = []
    for codec in ("dynamic8", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)
        ddp = DistributedDataParallel(model, **options)
        job = laconic.compress(ddp, codec) if codec else None
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.randn(16, 64).to(dtype)).square().mean().backward()
        gradients.append(model[0].weight.grad.double())
        assert model[0].weight.grad.dtype == dtype
        if job:
            job.close()
    return float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())


def _refused(model: nn.Module) -> str:
    try:
        laconic.compress(model, "dynamic8")
    except BadInput as error:
        return str(error)
    return "accepted"


def _try_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {str(dtype): _error_of_the_mean(dtype) for dtype in DTYPES}
    found["static graph"] = _error_of_the_mean(torch.float32, static_graph=True)
    found["unused"] = _error_of_the_mean(torch.float32, find_unused_parameters=True)
    twice = DistributedDataParallel(nn.Linear(4, 4))
    laconic.compress(twice, "dynamic8")
    found["twice"] = _refused(twice)
    found["complex"] = _refused(DistributedDataParallel(nn.Linear(4, 4, dtype=torch.complex64)))
    found["fsdp1"] = _refused(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    laconic.init().close()
    dist.destroy_process_group()
    return found


def test_what_the_page_says() -> None:
    for found in run_local(2, _try_all, timeout_s=100):
        for name in (*map(str, DTYPES), "static graph", "unused"):
            assert 0 < found.pop(name) < 0.05, f"{name}: an 8-bit type is within 3 %, and not exact"
        assert found == {
            "twice": "this model is compressed already; a codec that changes is {first step: codec}",
            "complex": "parameter 'weight' is complex: gradients are exchanged as real numbers; keep "
            "torch.view_as_real of it as the parameter",
            "fsdp1": "compress takes a DistributedDataParallel model or one that fully_shard was applied to, got "
            "FullyShardedDataParallel; wrap it, or call fully_shard on it, first",
        }
