"""`laconic.compress` on real DDP ranks: it trains, ranks agree to the bit, state survives, errors surface."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.plans import PlannedCodec
from laconic.errors import BadInput, UnknownName
from laconic.exchange.buckets import BucketChannels, BucketGroup
from laconic.exchange.coded import Route
from laconic.exchange.layout import BucketInfo, Entry, Exemptions
from laconic.exchange.options import Options
from laconic.exchange.ownership import merge_state_dicts, owned
from laconic.exchange.residuals import Residuals
from laconic.exchange.state import CompressionState
from laconic.exchange.thread import ExchangeThread
from laconic.schedules.link import Link
from laconic.transports.base import Transport, finish
from laconic.transports.launcher import run_local
from laconic.transports.profile import Profile
from laconic.transports.threads import run_threads
from laconic.transports.world import World


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _train(ddp: nn.Module, steps: int, x: torch.Tensor, y: torch.Tensor, seed: int) -> float:
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(0, 1400, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[rows]), y[rows]).backward()
        optimizer.step()
    return float((ddp(x[1400:]).argmax(1) == y[1400:]).float().mean())


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _everything() -> dict[str, Any]:
    """One world, several checks, because starting processes is the slow part."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    x, y = _data()
    for spec in ("none", "dynamic8", "topk(0.05)+qsgd(4)"):
        model = _model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # several buckets, rebuilt after the first step
        state = laconic.compress(ddp, spec, message_nbytes=0 if spec == "dynamic8" else 1 << 18)
        found[spec] = _train(ddp, 90, x, y, dist.get_rank())
        everyone = laconic.all_gather(_flat(model), algorithm="ring")
        assert all(torch.equal(row, everyone[0]) for row in everyone), spec
        found[f"{spec} nbytes"] = sum(r.sent_nbytes for r in state.records if r.step == 60)
        assert (len({r.bucket for r in state.records}) > 1) == (spec in ("none", "dynamic8"))  # the others are held
        if spec == "topk(0.05)+qsgd(4)":
            found["state"] = state.state_dict()
            names = {name for name, p in model.named_parameters() if p.dim() > 1 and p.numel() >= 1024}
            assert set(found["state"]["residuals"]) == names  # biases and the small last layer are exact
            again = CompressionState(spec, model.named_parameters())
            again.load_state_dict(state.state_dict())
            for name, value in again.state_dict()["residuals"].items():
                assert torch.equal(value, found["state"]["residuals"][name])
            again.close()
        state.close()

    ddp = DistributedDataParallel(_model())
    state = laconic.compress(ddp, {0: "none", 3: "topk(0.1)", 6: "dynamic8"}, exempt=["2.weight"])
    with pytest.raises(BadInput, match="already"):
        laconic.compress(ddp, "dynamic8")
    with pytest.raises(UnknownName, match="message_nbytes"):
        laconic.compress(DistributedDataParallel(_model()), "dynamic8", foo=1)
    _train(ddp, 10, x, y, dist.get_rank())
    found["codecs"] = [r.codec for r in state.records if r.bucket == 0]
    state.close()
    assert not [t for t in threading.enumerate() if t.name == "laconic-exchange"]

    ddp = DistributedDataParallel(_model())
    state = laconic.compress(ddp, lambda step: "dynamic8" if step < 2 else 1 / 0)  # type: ignore[arg-type,return-value]
    try:
        _train(ddp, 5, x, y, dist.get_rank())
    except ZeroDivisionError as error:
        found["error"] = repr(error)
    except RuntimeError as error:
        found["error"] = str(error)
    state.close()
    doubles = torch.full((8,), 1.0 + 1e-12 * dist.get_rank(), dtype=torch.float64)
    state = CompressionState("none")
    state.buckets.exchange([(doubles, [nn.Parameter(torch.zeros(8, dtype=torch.float64))])])
    found["doubles"] = doubles - 1.0
    state.close()
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_ddp() -> None:
    results = run_local(3, _everything, timeout_s=110)
    for found in results:
        assert found["dynamic8"] > found["none"] - 0.03
        assert found["topk(0.05)+qsgd(4)"] > found["none"] - 0.05
        assert found["topk(0.05)+qsgd(4) nbytes"] < found["dynamic8 nbytes"]
        assert found["codecs"] == ["none"] * 3 + ["topk(0.1)"] * 3 + ["dynamic8"] * 4
        assert "division by zero" in found["error"]
        torch.testing.assert_close(found["doubles"], torch.full((8,), 1e-12, dtype=torch.float64), rtol=1e-3, atol=0)
    states = [found["state"] for found in results]
    for new_size in (1, 2, 5):
        merged = merge_state_dicts(states, new_size)
        for name in states[0]["residuals"]:
            before = torch.stack([s["residuals"][name] for s in states]).mean(0)
            after = torch.stack([s["residuals"][name] for s in merged]).mean(0)
            torch.testing.assert_close(after, before)


def _closed(sharded: bool) -> dict[str, Any]:
    """One step with a job, and one after it was closed."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), dict[str, Any]()
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(64, 64, bias=False)
    model = fully_shard(model) if sharded else DistributedDataParallel(model)
    job = laconic.compress(model, "onebit")
    for name in ("compressed", "closed"):
        model.zero_grad()
        (model(torch.arange(64.0).view(1, 64)) * (rank + 1)).sum().backward()
        (gradient,) = (p.grad for p in model.parameters())
        found[name] = gradient.full_tensor() if sharded else gradient
        job.close()
        found["threads"] = [t.name for t in threading.enumerate() if t.name == "laconic-exchange"]
    found["records"] = len(job.records)
    if not sharded:  # torch takes one hook: a model whose job was closed is compressed again through it
        for codec in ("onebit", "none"):
            again = laconic.compress(model, codec)
            model.zero_grad()
            (model(torch.arange(64.0).view(1, 64)) * (rank + 1)).sum().backward()
            found[f"again {codec}"] = next(p.grad.clone() for p in model.parameters() if p.grad is not None)
            assert len(again.records) == 1
            again.close()
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("sharded", [False, True])
def test_after_close_the_model_trains_alone_again(sharded: bool) -> None:
    for found in run_local(2, _closed, (sharded,), timeout_s=60):
        exact = 1.5 * torch.arange(64.0).expand(64, 64)
        assert not torch.equal(found["compressed"], exact)
        assert torch.equal(found["closed"], exact)
        if not sharded:
            assert torch.equal(found["again onebit"], found["compressed"])
            assert torch.equal(found["again none"], exact)
        assert found["threads"] == []
        assert found["records"] == 1


def test_exemptions() -> None:
    default, named = Exemptions(), Exemptions(names=("head",))
    assert default.covers("bias", torch.zeros(5000))
    assert default.covers("small.weight", torch.zeros(10, 10))
    assert not default.covers("weight", torch.zeros(100, 100))
    assert named.covers("head.weight", torch.zeros(100, 100))
    assert not Exemptions(vectors=False, smaller_than=0).covers("bias", torch.zeros(5))
    with pytest.raises(BadInput, match="regular expression"):
        Exemptions(names=("(",))


def test_codec_schedules() -> None:
    with pytest.raises(BadInput, match="entry for step 0"):
        PlannedCodec({5: "none"})
    with pytest.raises(UnknownName):
        PlannedCodec("dynamic9")
    with pytest.raises(BadInput, match="matrices"):
        PlannedCodec("powersgd(2)")
    assert str(PlannedCodec(lambda step: f"topk({0.5 / (step + 1)})").at(1)) == "topk(0.25)"


def test_residuals_follow_a_parameter_to_another_codec_and_bucket() -> None:
    entries = (Entry("a", 0, 2000, False), Entry("b", 2000, 2010, True), Entry("c", 2010, 5000, False))
    left = {"a": torch.arange(2000.0), "c": torch.arange(2990.0)}
    residuals = Residuals()
    residuals.load_state_dict(left)
    for layout in (BucketInfo(entries[:1], 2000), BucketInfo(entries, 5000)):
        bucket = BucketChannels(layout, (residuals,))
        for spec in ("topk(0.1)", "dynamic8", "qsgd(4)", "none"):  # the last two feed nothing back: they send all
            bucket.use(laconic.codec(spec))
            kept = residuals.state_dict()
            assert kept.keys() == left.keys()
            assert all(torch.equal(kept[name], value) for name, value in left.items())
    buffer = torch.zeros(5000)
    run_threads(1, lambda t: finish(BucketGroup([bucket]).steps([buffer], Route(t))))
    assert torch.equal(buffer, torch.cat([left["a"], torch.zeros(10), left["c"]]))
    assert residuals.state_dict() == {}


def test_buckets_let_go_of_gradients_that_were_exchanged() -> None:
    entries = (Entry("a", 0, 2000, False), Entry("b", 2000, 2010, True))
    bucket = BucketChannels(BucketInfo(entries, 2010), (Residuals(),))
    bucket.use(laconic.codec("dynamic8"))
    run_threads(1, lambda t: finish(BucketGroup([bucket]).steps([torch.ones(2010)], Route(t))))
    assert [channel.buffer.numel() for channel in bucket.channels] == [0, 0]


def _job(number: int, seen: list[str], pauses: int = 1) -> Callable[[], Generator[None, None, torch.Tensor]]:
    def steps() -> Generator[None, None, torch.Tensor]:
        for pause in range(pauses):
            seen.append(f"{number}.{pause}")
            yield
        seen.append(f"{number} ends")
        if number < 0:
            raise ZeroDivisionError("division by zero")
        return torch.tensor(number)

    return steps


@pytest.mark.parametrize("spec", ["fp16", "bf16", "dynamic8", "onebit"])
@pytest.mark.parametrize("feedback", [None, True])
def test_one_bad_gradient_spoils_one_step_only(spec: str, feedback: bool | None) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))

    def work(transport: Transport) -> list[bool]:
        state = CompressionState(spec, [("w", weight)], Options(feedback=feedback, world=World(transport)))
        finite = []
        for step in range(4):
            gradient = torch.full((4096,), 0.1)
            if step == 1 and transport.rank == 1:
                gradient[7] = float("inf") if spec == "fp16" else float("nan")
            state.buckets.exchange([(gradient, [weight])])
            finite.append(bool(torch.isfinite(gradient).all()))
        return finite

    for finite in run_threads(2, work):
        assert finite == [True, False, True, True]


def test_worker_keeps_order_and_passes_errors_on() -> None:
    worker, seen = ExchangeThread(), []
    futures = [worker.submit(_job(i, seen)) for i in range(50)]
    assert [int(f.wait()) for f in futures] == list(range(50))
    assert seen == [text for i in range(50) for text in (f"{i}.0", f"{i} ends")]
    broken, after = worker.submit(_job(-1, seen)), worker.submit(_job(1, seen))
    for future in (broken, after):
        with pytest.raises(Exception, match="division by zero"):
            future.wait()
    worker.close()
    worker.close()
    with pytest.raises(Exception, match="closed"):
        worker.submit(_job(1, seen)).wait()


def test_worker_begins_the_next_job_while_one_waits() -> None:
    seen: list[str] = []
    worker, here = ExchangeThread(depth=2), threading.Event()
    first = worker.submit(lambda: (here.wait(), _job(0, seen, pauses=2)())[1])  # until all three are queued
    others = [worker.submit(_job(number, seen)) for number in (1, 2)]
    here.set()
    assert [int(future.wait()) for future in (first, *others)] == [0, 1, 2]
    assert seen == ["0.0", "1.0", "0.1", "0 ends", "2.0", "1 ends", "2 ends"]
    worker.close()


def test_worker_begins_a_job_that_comes_while_it_waits() -> None:
    seen: list[str] = []
    worker, came = ExchangeThread(depth=2), threading.Event()

    def waits() -> Generator[Callable[[], None], None, torch.Tensor]:
        seen.append("first")
        yield lambda: came.wait(20) and None
        seen.append("first ends")
        return torch.tensor(0)

    def brings() -> Generator[None, None, torch.Tensor]:
        seen.append("second")
        came.set()
        yield
        return torch.tensor(1)

    first = worker.submit(waits)
    while not seen:
        time.sleep(0.01)
    time.sleep(0.05)  # it waits now
    assert [int(future.wait()) for future in (worker.submit(brings), first)] == [1, 0]
    assert seen == ["first", "second", "first ends"]
    worker.close()


def test_wrong_use() -> None:
    with pytest.raises(BadInput, match="DistributedDataParallel"):
        laconic.compress(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="gather"):
        Options(algorithm="star")
    with pytest.raises(BadInput, match="powersgd"):
        CompressionState("powersgd(2)", nn.Linear(40, 40).named_parameters(), Options(momentum=0.9))
    with pytest.raises(BadInput, match="3 ranks"):
        Options(hosts=(0, 0, 1), world=laconic.init())
    parameters = list(nn.Linear(40, 40).named_parameters())
    with pytest.raises(BadInput, match="'head' is found in no parameter's name; the names: weight, bias"):
        CompressionState("dynamic8", parameters, Options(exempt=["head"]))
    state = CompressionState("dynamic8", parameters)
    with pytest.raises(BadInput, match="no job's state"):
        state.load_state_dict({})
    with pytest.raises(BadInput, match=r"no parameter '0\.weight'"):
        state.load_state_dict(owned({"step": 1, "residuals": {"0.weight": torch.zeros(1)}}, 0, 1))
    with pytest.raises(BadInput, match="auto"):
        laconic.all_reduce(torch.ones(4), codec="auto")
    with pytest.raises(BadInput, match="NoneType"):
        laconic.distribute(nn.Linear(2, 2), None)  # type: ignore[arg-type]
    laconic.init().close()


def _back_to_exact() -> dict[str, Any]:
    """Exact, then a codec whose buckets travel together, then exact again."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    with laconic.compress(ddp, {0: "none", 3: "topk(0.1)", 5: "none"}) as job:
        kept = []
        for _ in range(7):
            ddp(torch.ones(1, 64)).sum().backward()
            kept.append(sorted(job.state_dict()["residuals"]))
        job.finish()
        found = {"kept": kept, "algorithms": [(r.step, r.algorithm) for r in job.records if r.bucket == 0]}
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_the_float32_shortcut_waits_until_no_residual_is_left() -> None:
    (found,) = run_local(1, _back_to_exact, timeout_s=60)
    both = ["0.weight", "1.weight"]
    assert found["kept"] == [[], [], [], both, both, [], []]
    assert [algorithm for _, algorithm in found["algorithms"]] == ["native"] * 3 + ["gather"] * 2 + ["native"] * 2


def test_a_message_carries_what_suits_the_link() -> None:
    def sizes(transport: Transport) -> list[int]:
        found = []
        for link in (None, "100mbit,50us", "10gbit,1ms"):
            profile = None if link is None else Profile("threads", 2, Link.parse(link))
            for given in (None, 1 << 10):
                options = Options(world=World(transport, profile), message_nbytes=given)
                found.append(CompressionState("fp16", options=options).buckets.buffer_nbytes)
        return found

    default, slow, quick = 1 << 18, 1 << 16, 1 << 22
    wanted = [2 * nbytes for size in (default, slow, quick) for nbytes in (size, 1 << 10)]  # fp16 halves float32
    for found in run_threads(2, sizes):
        assert found == pytest.approx(wanted, rel=0.01)
