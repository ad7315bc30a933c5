"""How many files a gradient passes: a real step of two ranks is traced, on all its threads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.exchange.thread import ExchangeThread
from laconic.transports.launcher import run_local

SOURCE = Path(laconic.__file__).parent
MOST = {"compress": 10, "distribute": 12}
# They look before every forward, for a DDP model and for parameters that came later, and see no gradient.
BESIDE = {"consistency/silenced_ddp.py", "exchange/newcomers.py"}
STEADY = 6  # steps, after which all is planned and everything overlaps


def _stop(path: str) -> str | None:
    """The file of a frame, below `laconic`; a codec, of however many files, is one stop."""
    if not path.startswith(str(SOURCE)):
        return None
    inner = Path(path).relative_to(SOURCE)
    return "codecs" if inner.parts[0] == "codecs" else str(inner)


def _passed(door: str) -> set[str]:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (stop := _stop(frame.f_code.co_filename)) is not None:
            seen.add(stop)

    model: nn.Module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if door == "compress":
        model = DistributedDataParallel(model)
        job: Any = laconic.compress(model, "dynamic8")
    else:
        job = laconic.distribute(model, optimizer, codec="dynamic8")
    advance, traced = ExchangeThread._advance, False

    def advanced(self: ExchangeThread, each: Any) -> None:
        sys.setprofile(note if traced else None)
        advance(self, each)

    ExchangeThread._advance = advanced  # type: ignore[method-assign]
    for step in range(STEADY + 2):
        traced = step >= STEADY
        sys.setprofile(note if traced else None)
        optimizer.zero_grad()
        model(torch.randn(8, 256)).sum().backward()
        optimizer.step()
    sys.setprofile(None)
    traced = False
    job.close()
    laconic.init().close()
    dist.destroy_process_group()
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("door", MOST)
def test_a_gradient_passes_few_files(door: str) -> None:
    seen = set().union(*run_local(2, _passed, (door,), timeout_s=60)) - BESIDE
    assert "codecs" in seen, "the trace missed the exchange thread"
    assert "transports/torchdist.py" in seen
    assert len(seen) <= MOST[door], sorted(seen)
