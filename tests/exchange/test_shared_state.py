"""Checkpoints that ranks share give every rank its own residuals back, to the bit, or are refused."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput
from laconic.transports.launcher import run_local

EXAMPLES = Path(__file__).parents[2] / "examples"


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _compressed() -> tuple[nn.Module, torch.optim.Optimizer, laconic.exchange.CompressionState]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 40))
    return ddp, torch.optim.SGD(ddp.parameters(), 0.1), laconic.compress(ddp, "topk(0.05)")


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def _rank_0_saves(folder: str) -> dict[str, Any]:
    """DDP with `compress`: one file, written by rank 0."""
    model, optimizer, job = _compressed()
    _steps(model, optimizer, range(4))
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    kept["job"] = laconic.SharedState(job).state_dict()
    if dist.get_rank() == 0:
        torch.save(kept, f"{folder}/all.pt")
    _steps(model, optimizer, range(4, 8))
    whole = _weights(model)
    job.close()
    model, optimizer, job = _compressed()
    dist.barrier()
    kept = torch.load(f"{folder}/all.pt")  # weights_only, as torch does by default
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    laconic.SharedState(job).load_state_dict(kept["job"])
    _steps(model, optimizer, range(4, 8))
    job.close()
    return {"same": torch.equal(whole, _weights(model)), "shared": kept["job"]}


def _without_the_recipe(folder: str) -> dict[str, str]:
    """What happened silently: DCP keeps one rank's residuals, or none where the new job has none yet."""
    found = {}
    for name, steps in (("stepped", 1), ("new", 0)):
        torch.manual_seed(0)
        model = nn.Linear(64, 40)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job = laconic.distribute(model, optimizer, codec="topk(0.05)")
        if name == "stepped":
            _steps(model, optimizer, range(4))
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/wrong")
        _steps(model, optimizer, range(steps))
        state = {"optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/wrong")
        try:
            optimizer.load_state_dict(state["optimizer"])
            found[name] = "loaded"
        except BadInput as error:
            found[name] = str(error)
        job.close()
    return found


def _all(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    example = runpy.run_path(str(EXAMPLES / "dcp_checkpoint.py"))
    found = {"dcp": example["main"](f"{folder}/dcp"), **_rank_0_saves(folder), "wrong": _without_the_recipe(folder)}
    found["loop"] = runpy.run_path(str(EXAMPLES / "ddp_checkpoint.py"))["main"](folder)
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_every_rank_gets_its_own_residuals_back(tmp_path: Path) -> None:
    ranks = run_local(2, _all, (str(tmp_path),), timeout_s=120)
    assert [found["dcp"] for found in ranks] == [True, True]
    assert [found["loop"] for found in ranks] == [True, True]
    assert [found["same"] for found in ranks] == [True, True]
    refused = [found["wrong"]["stepped"] for found in ranks]
    sentence = "whose residuals are its own; save laconic.SharedState(job)"
    assert any(each.startswith("[rank ") and sentence in each for each in refused)
    assert all("tensors that were saved" in found["wrong"]["new"] for found in ranks)
    _goes_on_alone(ranks[0]["shared"])


def _goes_on_alone(shared: dict[str, Any]) -> None:
    """One rank instead of two takes the mean of the residuals."""
    from laconic.storage.tree import loads

    old = [loads(block)["residuals"]["weight"] for block in shared["ranks"]]
    assert not torch.equal(*old)
    with laconic.init() as world:
        options = laconic.exchange.Options(world=world)
        job = laconic.exchange.CompressionState("topk(0.05)", nn.Linear(64, 40).named_parameters(), options)
        with pytest.warns(UserWarning, match="saved by 2 ranks"):
            laconic.SharedState(job).load_state_dict(shared)
        assert torch.equal(job.state_dict()["residuals"]["weight"], (old[0] + old[1]) / 2)
        with pytest.raises(BadInput, match="no state of laconic"):
            laconic.SharedState(job).load_state_dict({"ranks": [b"nothing"]})
        job.close()


def test_jobs_that_cannot_be_shared() -> None:
    model = nn.Linear(2, 2)
    job = laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency="local")
    with pytest.raises(BadInput, match="its workers have weights of their own"):
        laconic.SharedState(job)
    job.close()
    laconic.init().close()


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_lightning_goes_on_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "lightning_checkpoint.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=220, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank (\d): resumed to the bit: (True|False)", done.stdout)  # two processes share the stream
    assert sorted(found) == [("0", "True"), ("1", "True")]
