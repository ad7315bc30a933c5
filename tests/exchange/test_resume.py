"""A job that is stopped, made anew and loaded through `compress` goes on to the bit, whatever DDP's first buckets."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import codecs
from laconic.errors import BadInput
from laconic.exchange.costs import SPARSE, coded_names
from laconic.exchange.options import Options
from laconic.exchange.state import CompressionState
from laconic.transports.base import Transport
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from tests.codecs.subjects import specs_of

SPECS = [*(specs_of(name)[0] for name in codecs.names()), "topk(0.05)+qsgd(4)", "dynamic8+entropy"]
CASES: list[tuple[str, dict[str, Any]]] = [(spec, {}) for spec in SPECS]
CASES += [("dynamic8", {"algorithm": algorithm}) for algorithm in ("direct", "gather", "ring")]
CASES += [("topk(0.1)", {"momentum": 0.9}), ("dynamic8", {"message_nbytes": 0}), ("none", {"algorithm": "direct"})]
SUMMED = {"butterfly"}  # a rank encodes the same values twice in a step, and both residuals are kept as one sum
STEPS = 3


class _Model(nn.Module):
    """Layers that are used in another order than they are made: DDP puts their gradients into other buckets later."""

    def __init__(self, seed: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Linear(44, 26)
        self.words = nn.Embedding(9, 64, sparse=sparse)
        self.first = nn.Linear(64, 52, bias=False)
        self.third = nn.Linear(40, 44, bias=False)
        self.second = nn.Linear(52, 40, bias=False)

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(self.second(self.first(x + self.words(word)).relu()).relu()).relu())


def _made(spec: str, options: dict[str, Any], seed: int) -> Any:
    plain = "momentum" in options
    ddp = DistributedDataParallel(_Model(seed, sparse=not plain), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.0 if plain else 0.9)
    return ddp, optimizer, laconic.compress(ddp, spec, **options)


def _train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, word = torch.randn(6, 64, generator=draw), torch.randint(0, 9, (6,), generator=draw)
        optimizer.zero_grad()
        ddp(x, word).square().mean().backward()
        optimizer.step()


def _weights(ddp: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


def _resumed(spec: str, options: dict[str, Any]) -> bool:
    """Whether the resumed training ended as the one that went on; a second checkpoint before the first step as well."""
    ddp, optimizer, job = _made(spec, options, seed=0)
    _train(ddp, optimizer, range(STEPS))
    file = io.BytesIO()
    torch.save([ddp.state_dict(), optimizer.state_dict(), job.state_dict()], file)
    _train(ddp, optimizer, range(STEPS, 2 * STEPS))
    expected, layout = _weights(ddp), job.state_dict().get("buckets")
    job.close()
    ddp, optimizer, job = _made(spec, options, seed=1)
    file.seek(0)
    for each, saved in zip((ddp, optimizer, job), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(saved)
    job.load_state_dict(job.state_dict())
    _train(ddp, optimizer, range(STEPS, 2 * STEPS))
    assert job.state_dict().get("buckets") == layout  # where they are DDP's: its own, from the second step on
    job.close()
    return torch.equal(_weights(ddp), expected)


def _all_cases() -> dict[str, bool]:
    dist.init_process_group("gloo")
    world = laconic.init(timeout_s=60)
    found = {f"{spec} {options or ''}": _resumed(spec, options) for spec, options in CASES}
    world.close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 3])
def test_resume_is_exact(size: int) -> None:
    for found in run_local(size, _all_cases, timeout_s=200):
        assert [case for case, same in found.items() if not same] == []


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("algorithm", sorted({*coded_names()} - {*SPARSE, "native"}))
def test_which_algorithms_are_exact(algorithm: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those of SUMMED on more than three ranks (docs/guides/resume.md); in segments, too."""
    monkeypatch.setattr("laconic.exchange.coded_plan.SEGMENT_NBYTES", 1000)
    weight = nn.Parameter(torch.zeros(50, 50))

    def work(transport: Transport) -> bool:
        def exchanged(state: CompressionState, steps: range) -> torch.Tensor:
            for step in steps:
                gradient = torch.randn(2500, generator=torch.Generator().manual_seed(10 * step + transport.rank))
                state.buckets.exchange([(gradient, [weight])])
            return gradient

        hosts = tuple(rank // 2 for rank in range(size)) if algorithm == "hierarchical" else None
        options = Options(algorithm=algorithm, hosts=hosts, world=World(transport))
        state, again = (CompressionState("dynamic8", [("w", weight)], options) for _ in range(2))
        exchanged(state, range(3))
        again.load_state_dict(state.state_dict())
        return torch.equal(exchanged(state, range(3, 5)), exchanged(again, range(3, 5)))

    assert run_threads(size, work) == [size < 4 or algorithm not in SUMMED] * size


@pytest.mark.parametrize("buckets", ["w", [[]], [["other"]], [[["w"]]], [[3]]])
def test_buckets_of_a_damaged_state_are_refused(buckets: Any) -> None:
    state = CompressionState("none", [("w", nn.Parameter(torch.zeros(4, 4)))])
    with pytest.raises(BadInput, match=r"'buckets'|no parameter 'other'"):
        state.load_state_dict({**state.state_dict(), "buckets": buckets})
