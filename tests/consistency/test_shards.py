"""Models that fully_shard divides inside each site, and modes of blocks between sites."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import laconic
from laconic.errors import BadInput
from laconic.transports.launcher import run_local

pytestmark = pytest.mark.processes
SITES = [0, 0, 1, 1]
WAYS: tuple[dict[str, Any], ...] = (
    {"consistency": "diloco(4)"},
    {"consistency": "diloco(6, fragments=2, delay=2, mix=0.5)"},
    {"consistency": "diloco(6, delay=3, eager=true)"},
    {"consistency": "local(5)", "codec": "dynamic8", "exempt": ()},
)


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


@contextmanager
def _mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo")
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "rank"))
    finally:
        dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    optimizer.zero_grad()
    (model(x) - x[:, :1]).square().mean().backward()
    optimizer.step()


def _whole(model: nn.Module) -> Tensor:
    parts = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _trained(options: dict[str, Any], mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Weights before and after `finish`; without a mesh every rank has the model whole, and sites average gradients."""
    model = _model()
    if mesh is not None:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["rank"])
        fully_shard(model, mesh=mesh["rank"])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    job = laconic.distribute(model, optimizer, sites=SITES, **({"codec": "none"} | options))
    for step in range(15):
        _step(model, optimizer, dist.get_rank(), step)
    before = _whole(model)
    job.finish()
    after = _whole(model)
    job.close()
    return before, after


def _alike(options: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    with _mesh() as mesh:
        return [_trained(options, None), _trained(options, mesh)]


@pytest.mark.parametrize("options", WAYS[:3], ids=lambda options: options["consistency"])
def test_a_sharded_model_is_trained_as_one_that_every_rank_has_whole(options: dict[str, Any]) -> None:
    for (plain_before, plain_after), (before, after) in run_local(4, _alike, (options,), timeout_s=60):
        torch.testing.assert_close(before, plain_before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after, plain_after, rtol=1e-4, atol=1e-5)


def _resumed(options: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    def begun(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = _model()
        fully_shard(model, mesh=mesh["rank"])
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return model, optimizer, laconic.distribute(model, optimizer, sites=SITES, **options)

    with _mesh() as mesh:
        ends, sent, kept = [], 0, None
        for first in (0, 8):
            model, optimizer, job = begun(mesh)
            if kept is not None:
                with torch.no_grad():
                    for parameter, shard in zip(model.parameters(), kept[0], strict=True):
                        parameter.to_local().copy_(shard)  # type: ignore[attr-defined]
                optimizer.load_state_dict(kept[1])
            for step in range(first, 15):
                if (first, step) == (0, 8):
                    shards = [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]
                    kept = shards, copy.deepcopy(optimizer.state_dict())
                _step(model, optimizer, dist.get_rank(), step)
            job.finish()
            ends.append(_whole(model))
            sent = job.crossed_nbytes
            job.close()
        return ends[0], ends[1], sent


@pytest.mark.parametrize("options", WAYS[1::2], ids=lambda options: options["consistency"])
def test_a_resumed_training_of_shards_has_the_same_bits(options: dict[str, Any]) -> None:
    found = run_local(4, _resumed, ({"codec": "none"} | options,), timeout_s=60)
    for whole, resumed, sent in found:
        assert torch.equal(whole, resumed)
        assert torch.equal(whole, found[0][0]), "one model in all sites"
        assert sent > 0


def _refusals() -> list[str]:
    said = []
    with _mesh() as mesh:
        model = _model()
        fully_shard(model, mesh=mesh["rank"])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wide = _model()
        fully_shard(wide, mesh=mesh)
        tries: list[tuple[nn.Module, dict[str, Any]]] = [
            (model, {"consistency": "diloco(4)"}),
            (model, {"consistency": "sync"}),
            (model, {"consistency": "diloco(4)", "sites": SITES, "site_codec": "dynamic8"}),
            (model, {"consistency": "diloco(4)", "sites": SITES, "masters": "device"}),
            (model, {"consistency": "diloco(4)", "sites": SITES, "period": "auto"}),
            (model, {"consistency": "diloco(4, state=forget)", "sites": SITES}),
            (model, {"consistency": "diloco(4)", "sites": [0, 1, 0, 1]}),
            (wide, {"consistency": "diloco(4)", "sites": SITES}),
        ]
        for each, options in tries:
            trainer = optimizer if each is model else torch.optim.SGD(wide.parameters(), 0.1)
            try:
                laconic.distribute(each, trainer, codec="none", **options)
            except BadInput as error:
                said.append(str(error))
    return said


def test_what_cannot_go_between_sites_is_one_sentence() -> None:
    for said in run_local(4, _refusals, timeout_s=60):
        for sentence, part in zip(said, (
            "and a mode of blocks with sites=… trains a sharded model between sites", "this one is sharded",
            "site_codec is not for a sharded model", "masters='device' is not for a sharded model",
            "period='auto' compares whole models", "state=keep", "this rank's site has", "mesh of one dimension",
        ), strict=True):  # fmt: skip
            assert part in sentence
            assert "\n" not in sentence
