"""Deep Gradient Compression against its slow reference, on real DDP ranks, and as training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.plans import PlannedCodec
from laconic.errors import BadInput
from laconic.exchange.buckets import BucketChannels, BucketGroup
from laconic.exchange.coded import Route
from laconic.exchange.dgc import DeepGradientCompression, MomentumCorrection, accelerate
from laconic.exchange.layout import BucketInfo, Entry, Exemptions
from laconic.exchange.options import Options
from laconic.exchange.ownership import merge_state_dicts, owned
from laconic.exchange.residuals import Residuals
from laconic.exchange.state import CompressionState
from laconic.transports.base import Transport, finish
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from reference import dgc as reference

# Two channels with an exempt parameter between them; "a" and "a2" share the first.
ENTRIES = [
    Entry("a", 0, 1500, False),
    Entry("a2", 1500, 2000, False),
    Entry("b", 2000, 2010, True),
    Entry("c", 2010, 5000, False),
]
CHANNELS = [slice(0, 2000), slice(2010, 5000)]
NUMEL = 5000


def _gradients(world_size: int, steps: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[step, rank, element], of very different sizes, so that some are sent late."""
    draw = np.random.default_rng(seed)
    return (draw.standard_normal((steps, world_size, NUMEL)) * draw.lognormal(0, 1, NUMEL)).astype(np.float32)


def _exchanged(
    gradients: np.ndarray[Any, Any],
    dgc: DeepGradientCompression,
    plan: Mapping[int, str],
    algorithm: str = "auto",
    entries: list[Entry] = ENTRIES,
) -> tuple[list[torch.Tensor], list[MomentumCorrection]]:
    """The mean of every step, the same bits on all ranks, and what each rank holds in the end."""

    def work(transport: Transport) -> tuple[list[torch.Tensor], MomentumCorrection]:
        correction, means = MomentumCorrection(dgc), []
        bucket = BucketChannels(BucketInfo(tuple(entries), NUMEL), (correction, Residuals()))
        for step, rows in enumerate(gradients):
            bucket.use(laconic.codec(plan[max(first for first in plan if first <= step)]))
            buffer = torch.from_numpy(rows[transport.rank].copy())
            finish(BucketGroup([bucket]).steps([buffer], Route(transport, algorithm, step=step)))
            means.append(buffer)
        return means, correction

    results = run_threads(gradients.shape[1], work)
    for means, _ in results:
        for mean, first in zip(means, results[0][0], strict=True):
            torch.testing.assert_close(mean, first, rtol=0, atol=0, equal_nan=True)
    return results[0][0], [correction for _, correction in results]


def _assert_same_mean(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """The same elements, and the same means but for the order of adding up to 7 ranks' values and dividing."""
    np.testing.assert_array_equal(found != 0, expected != 0)
    rounding = 8 * np.finfo(np.float32).eps * float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_against_the_reference(world_size: int, masking: bool, nesterov: bool) -> None:
    gradients = _gradients(world_size, 6)
    plan = {0: "topk(200)", 3: "topk(20)"}  # a warm-up: u and v go on
    dgc = DeepGradientCompression(0.9, nesterov=nesterov, masking=masking)
    means, corrections = _exchanged(gradients, dgc, plan, algorithm="gather")
    for channel in CHANNELS:
        numel = channel.stop - channel.start
        ranks = [reference.Rank(numel, 0.9, nesterov=nesterov, masking=masking) for _ in range(world_size)]
        for step, rows in enumerate(gradients):
            expected = reference.step(ranks, [row[channel] for row in rows], reference.largest(200 if step < 3 else 20))
            _assert_same_mean(means[step][channel].numpy(), expected)
        for rank, correction in zip(ranks, corrections, strict=True):
            held = torch.cat(
                [correction.velocities[e.name] for e in ENTRIES if channel.start <= e.start < channel.stop]
            )
            np.testing.assert_array_equal(held.numpy(), rank.u)
    # The exempt parameter follows plain momentum SGD.
    velocity = np.zeros(10)
    for mean, rows in zip(means, gradients, strict=True):
        g = rows[:, 2000:2010].astype(np.float64).mean(0)
        velocity = 0.9 * velocity + g
        expected = g + 0.9 * velocity if nesterov else velocity
        np.testing.assert_allclose(mean[2000:2010].numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", ["none", "topk(1000000)", "topk(1000000)+entropy", "threshold(1e-30)+none"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring"])
def test_sending_everything_is_momentum_sgd(spec: str, nesterov: bool, algorithm: str) -> None:
    gradients, settings_ = _gradients(3, 8), DeepGradientCompression(0.9, nesterov=nesterov, masking=False)
    means, _ = _exchanged(gradients, settings_, {0: spec}, algorithm)
    weight = nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], 1.0, momentum=0.9, nesterov=nesterov)
    for mean, rows in zip(means, gradients, strict=True):
        before = weight.detach().clone()
        weight.grad = torch.from_numpy(rows.astype(np.float64).mean(0))
        optimizer.step()
        rounding = 2e-6 * float(mean.abs().max())
        torch.testing.assert_close(mean.double(), before - weight.detach(), rtol=1e-5, atol=rounding)


def test_a_codec_that_keeps_nothing_back_is_not_masked_and_pays_what_is_owed() -> None:
    """topk, then none: Σ sent = Σ of all velocities, whatever was held back on the way."""
    gradients, dgc = _gradients(2, 6), DeepGradientCompression(0.5, masking=False)
    means, _ = _exchanged(gradients, dgc, {0: "topk(50)", 5: "none"})
    velocity, total = np.zeros(NUMEL), np.zeros(NUMEL)
    for rows in gradients:
        velocity = 0.5 * velocity + rows.astype(np.float64).mean(0)
        total += velocity
    sent = torch.stack(means).double().sum(0).numpy()
    np.testing.assert_allclose(sent, total, rtol=1e-4, atol=1e-5 * np.abs(total).max())


@pytest.mark.parametrize("spec", ["topk(30)", "topk(30)+qsgd(4)", "topk(30)+entropy", "topk(30)+dynamic8"])
def test_masking_stops_exactly_what_was_sent(spec: str) -> None:
    gradients = _gradients(1, 1)
    means, corrections = _exchanged(gradients, DeepGradientCompression(0.9), {0: spec}, algorithm="gather")
    order = np.argsort(-np.abs(gradients[0, 0, CHANNELS[1]]), kind="stable")
    velocity = corrections[0].velocities["c"].numpy()
    assert not velocity[order[:30]].any()
    assert velocity[order[30:]].all()
    assert corrections[0].velocities["b"].all()  # sent whole, moves on
    assert set(np.flatnonzero(means[0][CHANNELS[1]].numpy())) <= set(order[:30].tolist())


def test_auto_gathers_where_it_masks() -> None:
    """With direct, cheaper here, a rank would not know what was sent of its own chunk."""
    gradients = _gradients(7, 2)
    automatic, _ = _exchanged(gradients, DeepGradientCompression(0.9), {0: "topk(0.5)"})
    gathered, _ = _exchanged(gradients, DeepGradientCompression(0.9), {0: "topk(0.5)"}, "gather")
    assert all(torch.equal(a, b) for a, b in zip(automatic, gathered, strict=True))


def test_masking_in_many_small_runs() -> None:
    """More runs than views: the channel is a copy, and its indices count through all parameters."""
    entries = [Entry(f"p{i}", 250 * i, 250 * (i + 1), i % 2 == 1) for i in range(20)]
    gradients = _gradients(2, 4)
    dgc = DeepGradientCompression(0.9)
    means, corrections = _exchanged(gradients, dgc, {0: "topk(40)"}, "gather", entries)
    where = np.concatenate([np.arange(e.start, e.stop) for e in entries if not e.exempt])
    ranks = [reference.Rank(where.size, 0.9) for _ in range(2)]
    for step, rows in enumerate(gradients):
        expected = reference.step(ranks, [row[where] for row in rows], reference.largest(40))
        _assert_same_mean(means[step].numpy()[where], expected)
    for rank, correction in zip(ranks, corrections, strict=True):
        held = torch.cat([correction.velocities[e.name] for e in entries if not e.exempt])
        np.testing.assert_array_equal(held.numpy(), rank.u)


@pytest.mark.parametrize("world_size", [1, 4])
def test_clipping_is_local_by_parameter_and_scaled(world_size: int) -> None:
    """‖g/P‖ ≤ clip_norm/√P for each parameter; what lies below is untouched."""
    gradients = _gradients(world_size, 3)
    norms = [np.linalg.norm(gradients[:, :, e.start : e.stop], axis=2) for e in ENTRIES]
    clip_norm = float(np.median(norms[0])) / math.sqrt(world_size)  # some are clipped, some are not
    dgc = DeepGradientCompression(0.9, clip_norm=clip_norm)
    means, _ = _exchanged(gradients, dgc, {0: "none"})
    clipped = 0
    for e in ENTRIES:
        part = slice(e.start, e.stop)
        ranks = [reference.Rank(e.stop - e.start, 0.9, masking=False) for _ in range(world_size)]
        for step, rows in enumerate(gradients):
            clipped += sum(np.linalg.norm(row[part]) > math.sqrt(world_size) * clip_norm for row in rows)
            expected = reference.step(ranks, [row[part] for row in rows], reference.everything, clip_norm)
            np.testing.assert_allclose(means[step][part].numpy(), expected, rtol=1e-4, atol=1e-6)
    assert 0 < clipped < 3 * world_size * len(ENTRIES)


def test_clipping_of_independent_gradients_bounds_their_mean() -> None:
    """Why √P: P independent gradients, each as large as may be, have a mean of norm about clip_norm."""
    gradients = np.random.default_rng(0).normal(0, 100, (1, 7, NUMEL)).astype(np.float32)
    means, _ = _exchanged(gradients, DeepGradientCompression(0.0, clip_norm=2.0), {0: "none"})
    assert float(means[0][2010:].norm()) == pytest.approx(2.0, rel=0.05)


def test_huge_gradients_are_clipped_not_dropped() -> None:
    correction, buffer = MomentumCorrection(DeepGradientCompression(0.9, clip_norm=1.0)), torch.full((4,), 3e38)
    correction.before([Entry("a", 0, 4, False)], buffer, 1)
    torch.testing.assert_close(buffer, torch.full((4,), 0.5))


@given(
    numel=st.sampled_from([0, 1, 7, 4096, 4097, 9000]),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    scale=st.sampled_from([1.0, 0.3]),
    nesterov=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_the_kernel(numel: int, momentum: float, scale: float, nesterov: bool, seed: int) -> None:
    draw = np.random.default_rng(seed)
    u, g = draw.standard_normal((2, numel)).astype(np.float32)
    velocity, gradient = torch.from_numpy(u.copy()), torch.from_numpy(g.copy())
    m, s = np.float32(momentum), np.float32(scale)
    expected = m * u + s * g
    assert accelerate(velocity, gradient, momentum, scale, nesterov)
    np.testing.assert_array_equal(velocity.numpy(), expected)
    np.testing.assert_array_equal(gradient.numpy(), s * g + m * expected if nesterov else expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", ["topk(20)", "none"])
def test_nan_on_one_rank_spoils_one_step_only(spec: str, bad: float) -> None:
    gradients = _gradients(3, 3)
    gradients[1, 1, 2500] = bad
    means, corrections = _exchanged(gradients, DeepGradientCompression(0.9, clip_norm=50.0), {0: spec})
    assert means[0].isfinite().all()
    assert not means[1][2500].isfinite()
    assert means[2].isfinite().all()
    assert all(velocity.isfinite().all() for c in corrections for velocity in c.velocities.values())


def test_wrong_settings() -> None:
    for settings_ in ({"momentum": 1.0}, {"momentum": -0.1}, {"momentum": "0.9"}, {"clip_norm": 0}, {"masking": 1}):
        with pytest.raises(BadInput, match="must be"):
            DeepGradientCompression(**settings_)  # type: ignore[arg-type]
    named = list(nn.Linear(2, 2).named_parameters())
    with pytest.raises(BadInput, match="masking=False"):
        CompressionState("topk(0.1)", named, Options(momentum=0.9, algorithm="ring"))
    with pytest.raises(BadInput, match="feedback"):
        CompressionState("topk(0.1)", named, Options(momentum=0.9, feedback=False))
    with pytest.raises(BadInput, match="named_parameters"):
        CompressionState("topk(0.1)", options=Options(momentum=0.9))
    plain = CompressionState("topk(0.1)", named)
    with pytest.raises(BadInput, match="holds momentum"):
        plain.load_state_dict(owned({"step": 3, "residuals": {}, "velocity": {"weight": torch.ones(4)}}, 0, 1))
    plain.close()
    other = MomentumCorrection(DeepGradientCompression())
    other.load_state_dict({"weight": torch.ones(5)})
    with pytest.raises(BadInput, match="another model"):
        other.before([Entry("weight", 0, 4, False)], torch.ones(4), 1)
    laconic.init().close()


def test_an_optimiser_with_momentum_is_refused() -> None:
    model, stranger = nn.Linear(3, 3), nn.Linear(3, 3)
    state = CompressionState("topk(0.1)", model.named_parameters(), Options(momentum=0.9))
    model(torch.ones(3)).sum().backward()
    before = model.weight.detach().clone()
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.optim.Adam(model.parameters())):
        with pytest.raises(BadInput, match="of its own"):
            optimizer.step()
    assert torch.equal(model.weight, before)
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.optim.SGD(stranger.parameters(), 0.1, momentum=0.9).step()
    state.close()
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()  # nobody objects any more
    laconic.init().close()


def test_warm_up() -> None:
    plan = laconic.exchange.sparsity_warm_up(steps_per_epoch=10)
    kept = [1 - laconic.codec(spec).fraction for spec in plan.values()]  # type: ignore[attr-defined]
    assert kept == [0.75, 0.9375, 0.984375, 0.99609375, 0.999]
    assert list(plan) == [0, 10, 20, 30, 40]
    short = laconic.exchange.sparsity_warm_up("topk(0.05)+qsgd(2)+entropy", steps_per_epoch=3)
    assert short == {3 * i: f"topk({f})+qsgd(2)+entropy" for i, f in enumerate((0.25, 0.0625, 0.05))}
    for final in ("dynamic8", "topk(5)", "threshold(0.1)"):
        with pytest.raises(BadInput, match="takes a fraction"):
            laconic.exchange.sparsity_warm_up(final, steps_per_epoch=10)
    with pytest.raises(BadInput, match="steps_per_epoch"):
        laconic.exchange.sparsity_warm_up(steps_per_epoch=0)
    with pytest.raises(BadInput, match="between 0 and 1"):
        laconic.exchange.sparsity_warm_up(steps_per_epoch=1, fractions=(1.5,))


# --- real DDP ranks -------------------------------------------------------------------------------------------------

STEPS, CHECKPOINT, MERGE = 8, 4, 6
PLAN = {0: "threshold(1.0)+none", 3: "threshold(2.5)+none"}  # a selection that does not depend on how buckets are cut


class _Given(nn.Module):
    """A model whose gradients are what the test says."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"first": (60, 50), "bias": (50,), "second": (70, 40), "third": (40, 80)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * gradients[name]).sum() for name, p in self.named_parameters()]).sum()


def _given(step: int, rank: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(p.shape, generator=draw) for name, p in _Given().named_parameters()}


def _ddp_steps(steps: range, states: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The averaged gradients of `steps` and the state after them, with a checkpoint and new buckets on the way."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, saved, found = dist.get_rank(), None if states is None else states[dist.get_rank()], []
    ddp, state = None, None
    for step in steps:
        if ddp is None or step == CHECKPOINT:
            if state is not None:
                saved = state.state_dict()
                state.close()
            ddp = DistributedDataParallel(_Given(), bucket_cap_mb=0.015)
            correction = laconic.exchange.DeepGradientCompression(0.9, nesterov=True)
            state = laconic.compress(ddp, PLAN, momentum=correction, message_nbytes=1)
            if saved is not None:
                state.load_state_dict(saved)
        ddp.zero_grad()
        ddp(_given(step, rank)).backward()
        found.append({name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None})
    assert state is not None
    last = {**state.state_dict(), "buckets": state.buckets.bucket_count}
    state.close()
    laconic.init().close()
    dist.destroy_process_group()
    return found, last


@pytest.mark.processes
def test_ddp_through_new_buckets_codecs_a_checkpoint_and_another_world_size() -> None:
    before = run_local(3, _ddp_steps, (range(MERGE), None), timeout_s=60)
    states = [state for _, state in before]
    assert states[0]["buckets"] > 1
    after = run_local(2, _ddp_steps, (range(MERGE, STEPS), merge_state_dicts(states, 2)), timeout_s=60)
    for name, parameter in _Given().named_parameters():
        select = reference.everything if name == "bias" else None
        masking, numel = name != "bias", parameter.numel()
        ranks = [reference.Rank(numel, 0.9, nesterov=True, masking=masking) for _ in range(3)]
        for step in range(STEPS):
            if step == MERGE:
                for rank, state in zip(ranks, states, strict=True):
                    torch.testing.assert_close(state["velocity"][name], torch.from_numpy(rank.u))
                u, v = (np.mean([getattr(rank, what) for rank in ranks], 0, dtype=np.float32) for what in "uv")
                ranks = ranks[:2]
                for rank in ranks:
                    rank.u, rank.v = u, v
            rows = [_given(step, rank)[name].reshape(-1).numpy() for rank in range(len(ranks))]
            chosen = select or reference.beyond(1.0 if step < 3 else 2.5)
            expected = torch.from_numpy(reference.step(ranks, rows, chosen)).view_as(parameter)
            for found, _ in before if step < MERGE else after:
                got = found[step if step < MERGE else step - MERGE][name]
                if step < MERGE and name != "bias":
                    _assert_same_mean(got.numpy(), expected.numpy())
                else:  # the engine adds in its own order, and the mean of the states rounds
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# --- training ------------------------------------------------------------------------------------------------------


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _accuracy(seed: int, plan: Any, corrected: bool) -> float:
    """Test accuracy in points on the digits, two ranks, with the momentum in the exchange or in the optimiser."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1400], order[1400:]
    torch.manual_seed(seed)
    start = _network().state_dict()

    def work(transport: Transport) -> float:
        model = _network()
        model.load_state_dict(start)
        parameters, schedule = list(model.parameters()), PlannedCodec(plan)
        ends = np.cumsum([p.numel() for p in parameters]).tolist()
        spans = [(stop - p.numel(), stop, Exemptions().covers("", p)) for p, stop in zip(parameters, ends, strict=True)]
        entries = [Entry(str(number), *span) for number, span in enumerate(spans)]
        outer = (MomentumCorrection(DeepGradientCompression(0.9)),) if corrected else ()
        bucket = BucketChannels(BucketInfo(tuple(entries), ends[-1]), (*outer, Residuals()))
        group, optimizer = BucketGroup([bucket]), torch.optim.SGD(parameters, 0.1, momentum=0.0 if corrected else 0.9)
        draw = torch.Generator().manual_seed(1000 * seed + transport.rank)
        for step in range(250):
            rows = train[torch.randint(0, 1400, (32,), generator=draw)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            buffer = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
            bucket.use(schedule.at(step))
            finish(group.steps([buffer], Route(transport, step=step)))
            for parameter, entry in zip(parameters, entries, strict=True):
                parameter.grad = buffer[entry.start : entry.stop].view_as(parameter)
            optimizer.step()
        with torch.no_grad():
            return 100 * float((model(x[test]).argmax(1) == y[test]).float().mean())

    return run_threads(2, work)[0]


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Ranks that are threads must not each start OpenMP's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.slow
def test_training_reaches_float32_where_the_optimisers_momentum_does_not() -> None:
    warm_up = laconic.exchange.sparsity_warm_up("topk(0.002)", steps_per_epoch=11)
    seeds = range(3)
    exact = np.mean([_accuracy(seed, "none", False) for seed in seeds])
    corrected = np.mean([_accuracy(seed, warm_up, True) for seed in seeds])
    plain = np.mean([_accuracy(seed, "topk(0.002)", False) for seed in seeds])
    print(f"digits, 3 seeds: float32 {exact:.2f}, corrected {corrected:.2f}, the optimiser's momentum {plain:.2f}")
    assert corrected > exact - 1.0
    assert corrected > plain
