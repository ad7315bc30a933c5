"""The factors' exchange: the dense mean to rounding, whatever the model and the loop do; agreed, counted, let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.factors import Factors
from laconic.errors import BadInput, PayloadError
from laconic.exchange.coded import Route, max_nbytes
from laconic.exchange.job import LayerForm
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.matrices.factors import FactorsBucket
from laconic.exchange.matrices.linear_watch import LinearWatch
from laconic.exchange.residuals import Residuals
from laconic.transports.base import Transport, finish
from laconic.transports.faults import Faulty
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from tests.reference.codec_factors import weight_gradient

WEIGHTS = ("first.weight", "middle.weight")


class Net(nn.Module):
    """Two layers for which factors pay at a batch of 4, and a last one that is too small."""

    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(48, 40)
        self.middle = nn.Linear(40, 40, bias=False)
        self.last = nn.Linear(40, 3)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(self.first(x))
        for _ in range(self.uses):
            y = torch.tanh(self.middle(y))
        return self.last(y)


class Rank:
    """One rank without DDP: a model, its watch and one bucket of all its gradients."""

    def __init__(self, transport: Transport, model: nn.Module | None = None) -> None:
        self.transport = transport
        self.model = model or Net()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.watch = LinearWatch(self.model, {id(p): name for name, p in named})
        entries, at = [], 0
        for name, p in named:
            entries.append(Entry(name, at, at + p.numel(), p.numel() < 1024 and p.dim() > 1, tuple(p.shape)))
            at += p.numel()
        self.bucket = FactorsBucket(BucketInfo(tuple(entries), at), Residuals(), self.watch, set())
        self.bucket.use(Factors())
        self.step = 0
        self.generator = torch.Generator().manual_seed(transport.rank)

    def input(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, 48, generator=self.generator)

    def backward(self, *shape: int, penalty: float = 0.0) -> None:
        loss = self.model(self.input(*shape)).square().sum()
        if penalty:
            loss = loss + penalty * self.model.middle.weight.square().sum()  # type: ignore[union-attr,operator]
        loss.backward()

    def exchange(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, LayerForm], int]:
        """The gradients before and after, how each parameter went, and the bytes sent; zeroes the gradients."""
        before = torch.cat([p.grad.reshape(-1) for p in self.parameters])  # type: ignore[union-attr]
        after = before.clone()
        timings, _ = finish(self.bucket.steps(after, Route(self.transport, step=self.step)))
        self.step += 1
        self.model.zero_grad()
        assert set(self.watch._caught) <= {"last.weight"}  # which is exempt
        self.watch.clear()
        forms = {form.name: form for form in self.bucket.layers(self.transport.world_size)}
        return before, after, forms, timings.sent_nbytes


def _check(steps: list[list[Any]]) -> None:
    """Every rank's steps: the same bits on all, and the mean of the gradients to rounding."""
    for ranks in zip(*steps, strict=True):
        mean = torch.stack([before for before, *_ in ranks]).double().mean(0)
        scale = float(mean.abs().max())
        for _, after, *_ in ranks:
            assert torch.equal(after, ranks[0][1])
            torch.testing.assert_close(after.double(), mean, rtol=1e-5, atol=1e-6 * scale)


def _forms(steps: list[list[Any]], name: str = "middle.weight") -> list[list[str]]:
    """By step, by rank."""
    return [[forms[name].form for _, _, forms, _ in ranks] for ranks in zip(*steps, strict=True)]


def _plain(rank: Rank) -> None:
    rank.backward(4)


def _three_dimensions(rank: Rank) -> None:
    rank.backward(2, 2)


def _accumulated(rank: Rank) -> None:
    rank.backward(2)
    rank.backward(2)


def _uneven(rank: Rank) -> None:
    rank.backward(2 + 3 * rank.transport.rank)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backward", [_plain, _three_dimensions, _accumulated, _uneven])
def test_factors_give_the_dense_mean(size: int, backward: Callable[[Rank], None]) -> None:
    def work(transport: Transport) -> list[Any]:
        rank = Rank(transport)
        return [(backward(rank), rank.exchange())[1] for _ in range(3)]  # type: ignore[func-returns-value]

    steps = run_threads(size, work)
    _check(steps)
    for name in WEIGHTS:
        assert _forms(steps, name) == [["exact"] * size] + [["factors"] * size] * 2
    assert _forms(steps, "first.bias")[2] == ["with weight"] * size
    assert _forms(steps, "last.weight")[2] == ["exact"] * size


def test_as_the_reference() -> None:
    """The gradient of a single layer against a loop over all ranks' samples."""

    def work(transport: Transport) -> tuple[torch.Tensor, ...]:
        model = nn.Sequential(nn.Linear(48, 40))
        rank = Rank(transport, model)
        rank.backward(4)
        rank.exchange()
        x, delta = rank.input(4), torch.randn(4, 40, generator=rank.generator)
        model(x).backward(delta)
        return x, delta, rank.exchange()[1]

    ranks = run_threads(3, work)
    expected = sum(weight_gradient(o.numpy(), delta.numpy()) for o, delta, _ in ranks) / 3
    bias = torch.stack([delta.sum(0) for _, delta, _ in ranks]).mean(0)
    for *_, after in ranks:
        weight = after[: 40 * 48].view(40, 48).double()
        torch.testing.assert_close(weight, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[40 * 48 :], bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("uses", [2, 3])
def test_a_layer_used_more_than_once(uses: int) -> None:
    def work(transport: Transport) -> list[Any]:
        rank = Rank(transport, Net(uses))
        return [(rank.backward(2), rank.exchange())[1] for _ in range(2)]  # type: ignore[func-returns-value]

    steps = run_threads(2, work)
    _check(steps)
    assert _forms(steps)[1] == ["factors"] * 2


def test_what_factors_do_not_say_is_sent_as_it_is() -> None:
    """A penalty on the weight, gradients that were not zeroed, autocast: DDP's gradient is not δᵀ o."""

    def penalty(transport: Transport) -> list[Any]:
        rank = Rank(transport)
        return [(rank.backward(4, penalty=0.01), rank.exchange())[1] for _ in range(3)]  # type: ignore[func-returns-value]

    def not_zeroed(transport: Transport) -> list[Any]:
        rank = Rank(transport)
        steps = []
        for _ in range(3):
            rank.backward(4)
            kept = [p.grad.clone() for p in rank.parameters]  # type: ignore[union-attr]
            steps.append(rank.exchange())
            for p, grad in zip(rank.parameters, kept, strict=True):
                p.grad = grad
        return steps

    def autocast(transport: Transport) -> list[Any]:
        rank, steps = Rank(transport), []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                rank.backward(4)
            steps.append(rank.exchange())
        return steps

    for work in (penalty, not_zeroed, autocast):
        steps = run_threads(2, work)
        _check(steps)
        first, *later = _forms(steps)
        assert first == ["exact"] * 2
        # Not zeroed: the first step looked usable, so at the second each rank finds out for itself.
        expected = [["gathered exact"] * 2, ["exact"] * 2] if work is not_zeroed else [["exact"] * 2] * 2
        assert later == expected, work.__name__
        if work is penalty:
            assert _forms(steps, "first.weight")[2] == ["factors"] * 2


def test_one_rank_may_change_its_mind() -> None:
    def work(transport: Transport) -> list[Any]:
        rank, steps = Rank(transport), []
        for step in range(5):
            rank.backward(4, penalty=0.01 * (step == 2 and transport.rank == 1))
            steps.append(rank.exchange())
        return steps

    steps = run_threads(2, work)
    _check(steps)
    assert _forms(steps) == [
        ["exact", "exact"],
        ["factors", "factors"],
        ["factors", "gathered exact"],
        ["exact", "exact"],
        ["factors", "factors"],
    ]


def test_nan_on_one_rank_is_nan_on_all() -> None:
    def work(transport: Transport) -> list[Any]:
        rank, steps = Rank(transport), []
        for step in range(3):
            with torch.no_grad():
                rank.model.last.bias.fill_(float("nan") if (step, transport.rank) == (1, 0) else 0.5)
            rank.backward(4)
            steps.append(rank.exchange())
        return steps

    steps = run_threads(2, work)
    assert _forms(steps)[1] == ["gathered exact", "factors"]
    for number, ranks in enumerate(zip(*steps, strict=True)):
        mean = torch.stack([before for before, *_ in ranks]).mean(0)
        assert bool(mean.isnan().any()) == (number == 1)
        for _, after, *_ in ranks:
            assert torch.equal(after.isnan(), mean.isnan())


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_as_predicted(size: int) -> None:
    def work(transport: Transport) -> tuple[Any, int]:
        rank = Rank(transport)
        rank.backward(4)
        rank.exchange()
        before = transport.counters.total_sent_nbytes
        rank.backward(4)
        return rank.exchange(), transport.counters.total_sent_nbytes - before

    rest = 40 * 3 + 3 + 2 * 2  # the last layer, and two numbers for each layer that may go by factors
    sizes = [32 + 4 * 4 * (48 + 40), 32 + 4 * 4 * (40 + 40), 16 + 4 * rest]
    for (_, _, forms, sent), counted in run_threads(size, work):
        assert sent == counted == (size - 1) * max_nbytes(sizes)
        assert [forms[name].sent_nbytes for name in WEIGHTS] == [(size - 1) * n for n in sizes[:2]]
        for name in WEIGHTS:
            assert forms[name].sent_nbytes < forms[name].raw_nbytes


def test_a_large_batch_does_not_pay_and_holds_nothing() -> None:
    def work(transport: Transport) -> list[Any]:
        rank, steps = Rank(transport), []
        for batch in (4, 12, 12):  # 2·12·80 floats are more than 2·40·40/2, and less than 40·40 of a weight
            rank.backward(batch)
            steps.append(rank.exchange())
        rank.backward(64)
        assert not any(rank.watch._caught.values())
        steps.append(rank.exchange())
        return steps

    steps = run_threads(4, work)
    _check(steps)
    assert [form[0] for form in _forms(steps)] == ["exact", "factors", "exact", "exact"]


def test_nothing_is_held_without_backward_nor_after_an_exchange() -> None:
    def work(transport: Transport) -> None:
        rank = Rank(transport)
        x = rank.input(4)
        alive = weakref.ref(x)
        rank.model(x)  # no backward
        with torch.no_grad():
            rank.model(x)
        assert not rank.watch._caught
        del x
        gc.collect()
        assert alive() is None
        rank.backward(4)
        assert rank.watch._caught
        rank.exchange()
        rank.watch.close()
        rank.backward(4)
        assert not rank.watch._caught

    run_threads(1, work)


def test_frozen_layers_and_other_dtypes_are_not_watched() -> None:
    model = Net()
    model.first.weight.requires_grad_(False)
    model.last.double()
    watch = LinearWatch(model, {id(p): name for name, p in model.named_parameters()})
    assert list(watch.layers) == ["middle.weight"]


def test_what_an_earlier_codec_left_is_sent_exactly() -> None:
    def work(transport: Transport) -> list[Any]:
        rank, steps = Rank(transport), []
        for step in range(3):
            rank.backward(4)
            if step == 1:
                left = torch.full((1600,), float(1 + transport.rank))
                rank.bucket.residuals.load_state_dict({"middle.weight": left})
            before, *others = rank.exchange()
            before[48 * 40 + 40 :][:1600] += (1 + transport.rank) * (step == 1)
            steps.append((before, *others))
            assert rank.bucket.residuals.state_dict() == {}
        return steps

    steps = run_threads(2, work)
    _check(steps)
    assert _forms(steps) == [["exact"] * 2, ["gathered exact"] * 2, ["exact"] * 2]


def test_a_damaged_payload_is_refused() -> None:
    def work(transport: Transport) -> str:
        faulty = Faulty(transport, corrupt=lambda m: transport.rank == 1 and m.sequence == 2 and m.round == 0)
        rank = Rank(faulty)
        rank.backward(4)
        rank.exchange()
        rank.backward(4)
        if transport.rank == 1:
            rank.exchange()
            return ""
        with pytest.raises(PayloadError) as caught:
            rank.exchange()
        return str(caught.value)

    assert "[rank 0/2] factors all_reduce, round 1 of 1: peer 1 sent a bad payload" in run_threads(2, work)[0]


def test_wrong_use() -> None:
    with pytest.raises(BadInput, match="factors"):
        FactorsBucket(BucketInfo((), 0), Residuals(), None, set()).use(laconic.codec("dynamic8"))


def _batches(rank: int, count: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(0, len(x), (batch,), generator=generator) for _ in range(count)]
    return [(x[r], y[r]) for r in rows]


def _ddp() -> dict[str, Any]:
    """Training with factors and without, with no_sync at the end, side by side."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    weights = {}
    for spec in ("none", "factors"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.04)  # several buckets, rebuilt after the first step
        state = laconic.compress(ddp, spec)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        batches = _batches(dist.get_rank(), 20, 4)
        for number, (x, y) in enumerate(batches):
            if number < 14 or number % 2:  # then two batches a step
                nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with ddp.no_sync():
                    nn.functional.cross_entropy(ddp(x), y).backward()
            if number == 13:
                found[f"{spec} layers"] = {form.name: form.form for form in state.layers}
        weights[spec] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        everyone = laconic.all_gather(weights[spec], algorithm="ring")
        assert all(torch.equal(row, everyone[0]) for row in everyone), spec
        found["sent"] = sum(r.sent_nbytes for r in state.records if r.step == 12)
        found["raw"] = sum(form.raw_nbytes for form in state.layers)
        found[f"{spec} end"] = {form.name: form.form for form in state.layers}
        assert state.state_dict()["residuals"] == {}
        state.close()
    torch.testing.assert_close(weights["factors"], weights["none"], rtol=1e-4, atol=1e-5)
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_ddp() -> None:
    for found in run_local(2, _ddp, timeout_s=110):
        assert found["none layers"] == {}
        forms = found["factors layers"]
        assert [forms[f"{layer}.weight"] for layer in (0, 2, 4)] == ["factors"] * 3
        assert {forms[f"{layer}.bias"] for layer in (0, 2, 4)} <= {"with weight", "exact"}  # exact in another bucket
        assert found["factors end"] == forms  # with accumulation too
        assert found["sent"] < found["raw"] / 2
