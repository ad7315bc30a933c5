"""Overlapped and plain training see the same weights in every forward and end with the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import codecs
from laconic.transports.launcher import run_local
from laconic_lab.clusters.launch import run_job
from tests.consistency.overlapped.programs import MODELS, OPTIMISERS, compare

HIDDEN = "gradients are sent as backward makes them\na bucket's update is taken when the next forward needs it"
CHANGED = "are sent in step(): gradients are changed between backward and step()"
REASONS = {
    "clipped": CHANGED,
    "clamped": CHANGED,
    "scaled": CHANGED,
    "talking": "are sent in step(): the loop communicates between backward and step()",
    "zeros": "is waited for in step(): gradients are not set to None between two steps",
    "compiled": "is waited for in step(): all weights are used otherwise than through their modules",
    "closure": "is waited for in step(): the optimiser evaluates a closure",
}
Case = tuple[str, str, str, str]
CASES: list[Case] = [
    *((model, "momentum", "dynamic8", "plain") for model in MODELS),
    *(("tied", optimiser, "topk(0.1)+qsgd(4)", "plain") for optimiser in OPTIMISERS),
    *(("images", "adamw", codec, "plain") for codec in ("none", "onebit", "powersgd(2)", "factors")),
    *(("tied", "adamw", "dynamic8", way) for way in ("zeros", "accumulated", "no_sync", "looked at", "saved")),
    ("images", "rmsprop", "dynamic8", "saved"),  # its last layer travels in sections
    ("recurrent", "adamw", "dynamic8", "clipped"),
    ("recurrent", "adamw", "dynamic8", "clamped"),
    ("branches", "adamw", "dynamic8", "talking"),
    ("tied", "adafactor", "dynamic8", "autocast"),
    ("recurrent", "adamw", "dynamic8", "scaled"),
    ("images", "momentum", "dynamic8", "closure"),
    ("images", "adamw", "dynamic8", "compiled"),
]
CODECS = ["topk(0.1)+qsgd(4)", *("dynamic8+entropy" if name == "entropy" else name for name in codecs.names())]
PAIRS = list(product(MODELS, OPTIMISERS))
LONG: list[Case] = [  # every codec, and every optimiser for every model
    (model, optimiser, codec, "plain")
    for (model, optimiser), codec, _ in zip(
        cycle(PAIRS), cycle(CODECS), range(max(len(PAIRS), len(CODECS))), strict=False
    )
]


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_local(2, compare, (CASES, 9), timeout_s=400)


@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case) for case in CASES])
def test_two_ranks(number: int, ranks: list[list[dict[str, Any]]]) -> None:
    _check(CASES[number], [rank[number] for rank in ranks])


def _check(case: Case, found: list[dict[str, Any]]) -> None:
    assert all(each["parameters"] == found[0]["parameters"] for each in found), f"{case}: ranks differ"
    for each in found:
        assert not each["differs"], f"{case}: overlapped training has other {each['differs']}"
        if case[3] in REASONS:
            assert REASONS[case[3]] in each["explained"]
        elif case[2] == "factors":
            assert "codec factors looks at the forward" in each["explained"]
        else:
            assert HIDDEN in each["explained"], f"{case}: nothing was hidden, so nothing was compared"


ENGINES = [(1, "gloo"), (2, "gloo"), (4, "gloo"), (2, "zmq"), (2, "mpi")]


@pytest.fixture(scope="module", params=ENGINES, ids="{0[1]}-{0[0]}".format)
def at_length(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    size, engine = request.param
    if engine == "mpi":
        pytest.importorskip("mpi4py")
    return size, run_job(size, engine, compare, (LONG, 200), timeout_s=2900)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(LONG)), ids=[" ".join(case) for case in LONG])
def test_at_length(number: int, at_length: tuple[int, list[dict[str, Any]]]) -> None:
    size, case, found = at_length[0], LONG[number], at_length[1][number]
    if size == 1:
        assert not found["differs"], f"{case}: alone, training has other {found['differs']}"
    else:
        _check(case, [found])


def _through_ddp(way: str) -> tuple[list[float], int]:
    """The same training with the plain model, and with a DDP one whose own communication is to rest.

    Gradients are accumulated once the job no longer watches whether they are: by `no_sync`, or DDP's attribute.
    """
    wrapped = way != "plain"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    model = DistributedDataParallel(plain) if wrapped else plain
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    asked: list[int] = []
    if wrapped:
        model.register_comm_hook(asked, _never)  # type: ignore[operator]
    draws, losses = torch.Generator().manual_seed(dist.get_rank()), []
    with laconic.distribute(model, optimizer, codec="dynamic8") as job:
        no_sync = model.no_sync if wrapped else job.no_sync  # type: ignore[attr-defined]
        for step in range(8):
            optimizer.zero_grad()
            if step > 3:
                with nullcontext() if way == "attribute" else no_sync():
                    model.require_backward_grad_sync = not wrapped
                    model(torch.randn(8, 20, generator=draws)).square().mean().backward()
            model.require_backward_grad_sync = True
            loss = model(torch.randn(8, 20, generator=draws)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    dist.destroy_process_group()
    return losses, len(asked)


def _never(asked: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    asked.append(bucket.index())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_never.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


@pytest.mark.processes
def test_a_ddp_model_leaves_all_communication_to_the_job() -> None:
    plain, *others = (run_local(2, _through_ddp, (each,), timeout_s=100) for each in ("plain", "no_sync", "attribute"))
    for wrapped in others:
        assert plain == wrapped
        assert [asked for _, asked in wrapped] == [0, 0]
