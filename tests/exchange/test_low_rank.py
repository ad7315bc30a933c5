"""PowerSGD's exchange: as the reference on the mean, exact where it should be, counted, conserved, and in DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.powersgd import PowerSGD
from laconic.errors import BadInput
from laconic.exchange.coded import Route, max_nbytes
from laconic.exchange.job import wire_nbytes
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.matrices.low_rank import LowRankBucket
from laconic.exchange.ownership import merge_state_dicts
from laconic.exchange.residuals import Residuals
from laconic.exchange.state import CompressionState
from laconic.transports.base import Transport, finish
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from tests.reference.codec_powersgd import approximate

SHAPES = {"fc": (40, 32), "fc.bias": (40,), "conv": (16, 8, 3, 3), "small": (6, 6), "head": (12, 48)}
MATRICES = ("fc", "conv")  # a rank of 3 does not pay for "small", and "head" is exempt
EXACT = tuple(name for name in SHAPES if name not in MATRICES)
RANK = 3


def _entries() -> list[Entry]:
    entries, at = [], 0
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        entries.append(Entry(name, at, at + numel, name in ("fc.bias", "head"), shape))
        at += numel
    return entries


ENTRIES = _entries()
NUMEL = ENTRIES[-1].stop
INFO = BucketInfo(tuple(ENTRIES), NUMEL)
PLACES = {e.name: slice(e.start, e.stop) for e in ENTRIES}


def _gradients(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def _steps(transport: Transport, steps: int = 3, feedback: bool | None = None, **options: Any) -> dict[str, Any]:
    """What one rank sees in `steps` exchanges."""
    bucket = LowRankBucket(INFO, Residuals(feedback), {})
    bucket.use(PowerSGD(RANK))
    results, residuals, starts, sent = [], [], [], []
    for step in range(steps):
        starts.append({name: bucket.codec.start(_matrix(name), step, bucket.warm.get(name)) for name in MATRICES})
        buffer = _gradients(transport.rank, step)
        timings, _ = finish(bucket.steps(buffer, Route(transport, step=step, **options)))
        results.append(buffer)
        residuals.append(bucket.residuals.state_dict())
        sent.append(timings.sent_nbytes)
    total = transport.counters.total_sent_nbytes
    return {
        "results": results, "residuals": residuals, "starts": starts, "sent": sent, "total": total, "bucket": bucket,
    }  # fmt: skip


def _matrix(name: str) -> tuple[int, int]:
    rows = SHAPES[name][0]
    return rows, (PLACES[name].stop - PLACES[name].start) // rows


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("feedback", [True, False])
def test_as_the_reference_on_the_mean(size: int, feedback: bool) -> None:
    ranks = run_threads(size, lambda t: _steps(t, feedback=feedback))
    kept = [dict.fromkeys(MATRICES, torch.tensor(0.0)) for _ in range(size)]
    for step in range(3):
        for rank in ranks[1:]:
            assert torch.equal(rank["results"][step], ranks[0]["results"][step])
        gradients = [_gradients(rank, step) for rank in range(size)]
        mean, result = torch.stack(gradients).mean(0), ranks[0]["results"][step]
        for name in EXACT:
            torch.testing.assert_close(result[PLACES[name]], mean[PLACES[name]], rtol=1e-6, atol=1e-6)
        for name in MATRICES:
            inputs = torch.stack([gradients[r][PLACES[name]] + kept[r][name] for r in range(size)])
            start = ranks[0]["starts"][step][name].numpy()
            expected = approximate(inputs.mean(0).view(_matrix(name)).numpy(), start)
            torch.testing.assert_close(
                result[PLACES[name]].double(), torch.from_numpy(expected).reshape(-1), rtol=1e-4, atol=1e-5
            )
            if feedback:  # Σ sent + Σ residual = Σ input
                left = torch.stack([rank["residuals"][step][name] for rank in ranks]).sum(0)
                torch.testing.assert_close(size * result[PLACES[name]] + left, inputs.sum(0), rtol=1e-4, atol=1e-4)
        kept = [rank["residuals"][step] if feedback else kept[0] for rank in ranks]
    assert not any(ranks[0]["residuals"][2].values() if not feedback else [])


@pytest.mark.parametrize("algorithm", ["direct", "gather", "ring", "tree"])
def test_bytes_are_as_predicted(algorithm: str) -> None:
    size = 4
    ranks = run_threads(size, lambda t: _steps(t, 1, algorithm=algorithm))
    first = sum(PLACES[n].stop - PLACES[n].start for n in EXACT) + sum(RANK * _matrix(n)[0] for n in MATRICES)
    second = sum(RANK * _matrix(n)[1] for n in MATRICES)
    for rank in ranks:
        assert rank["sent"][0] == rank["total"] > 0
        if algorithm == "gather":
            assert rank["total"] == (size - 1) * (max_nbytes([16 + 4 * first]) + max_nbytes([16 + 4 * second]))
        forms = {form.name: form for form in rank["bucket"].layers(size)}
        assert [form.form for form in forms.values()] == [
            "powersgd(3)" if name in MATRICES else "exact" for name in SHAPES
        ]
        assert all(form.sent_nbytes < form.raw_nbytes for name, form in forms.items() if name in MATRICES) or (
            algorithm == "gather"
        )
    if algorithm == "direct":
        assert first % size == second % size == 0  # so that all chunks are alike
        for rank in ranks:
            each = [max_nbytes([16 + 4 * n // size]) for n in (first, second)]
            assert rank["total"] == 2 * (size - 1) * sum(each)
            said = sum(form.sent_nbytes for form in rank["bucket"].layers(size))
            assert said == wire_nbytes(first, size) + wire_nbytes(second, size)


def test_a_matrix_of_low_rank_is_exact_and_leaves_nothing() -> None:
    def work(transport: Transport) -> None:
        bucket = LowRankBucket(BucketInfo((Entry("m", 0, 1200, False, (40, 30)),), 1200), Residuals(), {})
        bucket.use(PowerSGD(2))
        generator = torch.Generator().manual_seed(0)
        left, right = torch.randn(40, 2, generator=generator), torch.randn(2, 30, generator=generator)
        buffer = (left @ right * (1 + transport.rank)).reshape(-1)
        finish(bucket.steps(buffer, Route(transport)))
        torch.testing.assert_close(buffer.view(40, 30), left @ right * 1.5, rtol=1e-4, atol=1e-4)
        assert float(bucket.residuals.state_dict()["m"].abs().max()) < 1e-4 * float(buffer.abs().max())

    run_threads(2, work)


def test_nan_on_one_rank_is_nan_on_all_and_passes() -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        bucket = LowRankBucket(INFO, Residuals(), {})
        bucket.use(PowerSGD(RANK))
        seen = []
        for step in range(3):
            buffer = _gradients(transport.rank, step)
            if step == 1 and transport.rank == 1:
                buffer[PLACES["fc"]][7] = float("inf")
                buffer[PLACES["fc.bias"]][3] = float("nan")
            finish(bucket.steps(buffer, Route(transport, step=step)))
            seen.append(buffer)
        return seen

    for seen in run_threads(3, work):
        assert torch.isfinite(torch.cat([seen[0], seen[2]])).all()
        assert torch.isnan(seen[1][PLACES["fc"]]).all()
        assert torch.isnan(seen[1][PLACES["fc.bias"]]).sum() == 1
        assert torch.isfinite(seen[1][PLACES["conv"]]).all()


def test_another_rank_keeps_the_residuals() -> None:
    def work(transport: Transport) -> None:
        bucket = LowRankBucket(INFO, Residuals(), {})
        for step, rank in enumerate((3, 1, 30)):  # with 30, no factors pay, and all is sent exactly
            bucket.use(PowerSGD(rank))
            before = bucket.residuals.state_dict()["fc"] if step else torch.zeros(1280)
            gradient = _gradients(0, step)
            paid = gradient.clone()
            finish(bucket.steps(paid, Route(transport, step=step)))
            after = bucket.residuals.state_dict().get("fc", torch.zeros(1280))
            torch.testing.assert_close(
                paid[PLACES["fc"]] + after, gradient[PLACES["fc"]] + before, rtol=1e-4, atol=1e-5
            )
        assert bucket.residuals.state_dict() == {}

    run_threads(1, work)


def test_wrong_use() -> None:
    with pytest.raises(BadInput, match="powersgd"):
        LowRankBucket(INFO, Residuals(), {}).use(laconic.codec("dynamic8"))
    with pytest.raises(BadInput, match="matrix_rank"):
        CompressionState("powersgd(0)")
    laconic.init().close()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes around ten points of 64 dimensions."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (1600,), generator=generator)
    centres = torch.randn(10, 64, generator=generator)
    return centres[labels] + 1.2 * torch.randn(1600, 64, generator=generator), labels


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _train(ddp: nn.Module, steps: int, seed: int) -> float:
    x, y = _data()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(0, 1200, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[rows]), y[rows]).backward()
        optimizer.step()
    return float((ddp(x[1200:]).argmax(1) == y[1200:]).float().mean())


def _same_everywhere(model: nn.Module) -> bool:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = laconic.all_gather(flat, algorithm="ring")
    return all(torch.equal(row, everyone[0]) for row in everyone)


def _ddp() -> dict[str, Any]:
    """One world, several checks, because starting processes is the slow part."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for spec in ("none", "powersgd(4)"):
        model = _model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # several buckets, rebuilt after the first step
        state = laconic.compress(ddp, spec)
        found[spec] = _train(ddp, 40, dist.get_rank())
        assert _same_everywhere(model), spec
        if spec == "powersgd(4)":
            assert len({r.bucket for r in state.records}) > 1
            assert {r.codec for r in state.records} == {spec}
            found["sent"] = sum(r.sent_nbytes for r in state.records if r.step == 30)
            found["layers"] = state.layers
            found["state"] = state.state_dict()
            kept, warm = found["state"]["residuals"], found["state"]["warm"]["powersgd"]
            assert set(kept) == set(warm) == {"0.weight", "2.weight"}
            again = CompressionState(spec, model.named_parameters())
            again.load_state_dict(state.state_dict())
            loaded = again.state_dict()
            assert all(torch.equal(loaded["residuals"][name], value) for name, value in kept.items())
            assert all(torch.equal(loaded["warm"]["powersgd"][name], value) for name, value in warm.items())
            again.close()
        state.close()

    model = _model()
    ddp = DistributedDataParallel(model)
    state = laconic.compress(ddp, {0: "none", 2: "topk(0.1)", 4: "powersgd(2)", 6: "dynamic8"})
    _train(ddp, 8, dist.get_rank())
    assert _same_everywhere(model)
    found["codecs"] = [r.codec for r in state.records if r.bucket == 0]
    state.close()
    laconic.init().close()
    dist.destroy_process_group()
    return found


def _go_on(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Another world size goes on with the residuals of the old one."""
    dist.init_process_group("gloo")
    model = _model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = laconic.compress(ddp, "powersgd(4)")
    mine = merge_state_dicts(states, dist.get_world_size())[dist.get_rank()]
    state.load_state_dict(mine)
    found = {"accuracy": _train(ddp, 30, dist.get_rank()), "same": _same_everywhere(model), "step": state.step}
    state.close()
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_ddp_and_another_world_size() -> None:
    results = run_local(3, _ddp, timeout_s=110)
    for found in results:
        assert found["none"] > 0.9
        assert found["powersgd(4)"] > found["none"] - 0.03
        assert found["codecs"] == ["none"] * 2 + ["topk(0.1)"] * 2 + ["powersgd"] * 2 + ["dynamic8"] * 2
        forms = {form.name: form.form for form in found["layers"]}
        exact = {name: form for name, form in forms.items() if not name.endswith(("0.weight", "2.weight"))}
        assert forms["0.weight"] == forms["2.weight"] == "powersgd(4)"
        assert set(exact.values()) == {"exact"}
        assert found["sent"] < sum(form.raw_nbytes for form in found["layers"]) / 4
    states = [found["state"] for found in results]
    merged = merge_state_dicts(states, 2)
    for name in ("0.weight", "2.weight"):
        before = torch.stack([s["residuals"][name] for s in states]).mean(0)
        after = torch.stack([s["residuals"][name] for s in merged]).mean(0)
        assert float(before.abs().sum()) > 0
        torch.testing.assert_close(after, before)
        first = states[0]["warm"]["powersgd"][name]
        assert all(torch.equal(s["warm"]["powersgd"][name], first) for s in [*states, *merged])
    for found in run_local(2, _go_on, (states,), timeout_s=110):
        assert found["same"]
        assert found["step"] == 70
        assert found["accuracy"] > 0.8
