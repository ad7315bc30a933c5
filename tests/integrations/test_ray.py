"""A training by Ray Train's own TorchTrainer, on two local workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = Path(__file__).parents[2]
    paths = os.pathsep.join([str(here / "src"), str(here)])
    ray.init(
        num_cpus=2, include_dashboard=False, configure_logging=False, object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    yield
    ray.shutdown()


def _loop(config: dict[str, Any]) -> None:
    """Whole, stopped and resumed trainings, one after the other."""
    import tempfile

    import torch
    import torch.distributed as dist
    from ray import train
    from torch import nn

    from laconic.integrations.ray import job_of, load_residuals, prepare_model, save_residuals

    def run(steps: range, folder: str, load: bool = False) -> list[float]:
        torch.manual_seed(0)
        model = prepare_model(nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)), "topk(0.05)")
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        if load:
            found = torch.load(f"{folder}/state.pt", weights_only=True)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            load_residuals(model, folder)
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/state.pt")
        save_residuals(model, folder)
        dist.barrier()
        metrics = job_of(model).metrics()
        assert 0 < metrics["sent_nbytes"] < 0.5 * metrics["dense_nbytes"]  # type: ignore[operator]
        return [value for p in model.parameters() for value in p.detach().reshape(-1).tolist()]

    folder = config["folder"]
    stopped = run(range(4), folder)
    resumed = run(range(4, 8), folder, load=True)
    with tempfile.TemporaryDirectory() as other:
        if dist.get_rank() == 0:
            Path(other).mkdir(exist_ok=True)
        whole = run(range(8), other)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, whole)
    train.report({
        "equal": everyone[0] == everyone[1], "resumed": resumed == whole, "moved": stopped != whole,
    }, checkpoint=train.Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None)  # fmt: skip


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_two_workers_resume_to_the_bit(cluster: None, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from laconic.integrations.ray import train_loop

    folder = tmp_path / "kept"
    folder.mkdir()
    result = TorchTrainer(
        train_loop(_loop), train_loop_config={"folder": str(folder)}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="laconic", storage_path=str(tmp_path)),
    ).fit()  # fmt: skip
    assert result.metrics is not None
    assert {name: result.metrics[name] for name in ("equal", "resumed", "moved")} == {
        "equal": True, "resumed": True, "moved": True
    }  # fmt: skip
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as kept:
        assert (Path(kept) / "laconic.pt").exists()
