"""A checkpoint of 4 ranks goes on with 2 or 3: what was owed is paid, to the last value, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput
from laconic.exchange.ownership import merge_state_dicts, owned
from laconic.transports.launcher import run_local

FORMS = ("direct", "gather", "ring", "butterfly", "hierarchical")
HOSTS = {4: (0, 0, 1, 1), 3: (0, 0, 1), 2: (0, 1)}
STEPS = 5
CODEC = "topk(0.05)"


def _digits(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32)[rank::4] / 16, torch.tensor(labels)[rank::4]


def _options(form: str, size: int) -> dict[str, Any]:
    return {"algorithm": form, "hosts": HOSTS[size] if form == "hierarchical" else None}


def _constant(form: str, saved: dict[str, Any] | None) -> dict[str, Any]:
    """A linear model whose gradient is the same at every step: all that is sent can be added up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(nn.Linear(40, 60, bias=False))
    state = laconic.compress(ddp, CODEC, **_options(form, size))
    if saved is not None:
        state.load_state_dict(saved)
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(rank))
    weights = torch.randn(7, 60, generator=torch.Generator().manual_seed(100 + rank))
    got = torch.zeros(60, 40, dtype=torch.float64)
    for _ in range(STEPS):
        ddp.zero_grad()
        (ddp(x) * weights).sum().backward()
        got += ddp.module.weight.grad.double()
    state.close()
    return {"got": got, "own": weights.t().double() @ x.double(), "state": state.state_dict()}


def _train(saved: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    ddp = DistributedDataParallel(model)
    state = laconic.compress(ddp, CODEC, algorithm="direct")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["laconic"])
    x, y = _digits(dist.get_rank())
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state.close()
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "laconic": state.state_dict()}
    return {"losses": losses, "kept": kept}


def _run(folder: str, old_size: int | None) -> dict[str, Any]:
    """All forms and the training, begun anew or from the files of `old_size` ranks."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    old = [torch.load(Path(folder) / f"{r}.pt") for r in range(old_size or 0)]
    found: dict[str, Any] = {}
    for form in FORMS:
        saved = merge_state_dicts([o[form]["state"] for o in old], size)[rank] if old else None
        found[form] = _constant(form, saved)
    resumed = None
    if old:
        owed = merge_state_dicts([o["training"]["kept"]["laconic"] for o in old], size)[rank]
        resumed = {**old[0]["training"]["kept"], "laconic": owed}
    found["training"] = _train(resumed)
    if not old:
        torch.save(found, Path(folder) / f"{rank}.pt")
    laconic.init().close()
    dist.destroy_process_group()
    return found


def _mean_owed(reports: list[dict[str, Any]], form: str) -> torch.Tensor:
    return torch.stack([r[form]["state"]["residuals"]["weight"].double().view(60, 40) for r in reports]).mean(0)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    before = run_local(4, _run, (str(tmp_path), None), timeout_s=110)
    for size in (2, 3):
        after = run_local(size, _run, (str(tmp_path), 4), timeout_s=110)
        for form in FORMS:
            owed = _mean_owed(before, form)
            assert owed.abs().max() > 1  # there is something to lose
            assert after[0][form]["state"]["step"] == 2 * STEPS
            # What came out and what is still owed is all that went in and was owed: in float32, summed over 5 steps.
            own = torch.stack([report[form]["own"] for report in after]).mean(0)
            came = after[0][form]["got"] + _mean_owed(after, form)
            torch.testing.assert_close(came, STEPS * own + owed, rtol=0, atol=2e-4)
        for report in after:
            first, then = before[0]["training"]["losses"], report["training"]["losses"]
            assert then[0] < 0.9 * first[0]  # where the first 15 steps had come to
            assert then[-1] < 0.8 * then[0]


def test_merging() -> None:
    residuals = enumerate(([1.0, 2.0], [3.0, 0.0]))
    states = [owned({"step": 3, "residuals": {"a": torch.tensor(left)}}, rank, 2) for rank, left in residuals]
    for size in (1, 2, 5):
        merged = merge_state_dicts(states, size)
        assert len(merged) == size
        assert all(m["step"] == 3 and m["residuals"]["a"].tolist() == [2.0, 1.0] for m in merged)
    for wrong in ([], states[:1] * 2, states[1:]):
        with pytest.raises(BadInput, match="every old rank"):
            merge_state_dicts(wrong, 2)
