"""codec="auto", quality="noise": unbiased estimates, a choice within its budget, the same on all ranks and resumed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput, UnknownName
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.noise import CANDIDATES, NoiseCodec
from laconic.exchange.noise_estimates import (
    PER_LAYER,
    RUN,
    RUNS,
    STEPS,
    WINDOW,
    LayerNoise,
    Sample,
    choose_within,
    signal_and_noise,
    window_of,
)
from laconic.exchange.options import Options
from laconic.exchange.state import CompressionState
from laconic.transports import run_threads
from laconic.transports.launcher import run_local

REVIEWED = 4 + WINDOW  # the first review is before this step


# estimates


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_signal_and_noise_are_unbiased(workers: int) -> None:
    random, trials, numel = np.random.default_rng(workers), 4000, 20
    gradient, sigma = np.linspace(-1, 1, numel), np.linspace(0.5, 3, numel)
    found = []
    for _ in range(trials):
        each = gradient + sigma * random.standard_normal((workers, numel))
        found.append(signal_and_noise(float((each**2).sum(1).mean()), float((each.mean(0) ** 2).sum()), workers))
    for values, wanted in zip(np.array(found).T, ((gradient**2).sum(), (sigma**2).sum()), strict=True):
        assert abs(values.mean() - wanted) < 5 * values.std() / math.sqrt(trials)


def test_sketches_keep_squared_norms() -> None:
    info = BucketInfo((Entry("w", 0, 300, exempt=False),), 300)
    x, y = torch.linspace(-1, 2, 300), torch.linspace(3, -1, 300)
    squares = []
    for seed in range(3000):
        sample = Sample.drawn(info, seed)
        squares.append(float(sample.sketch(x).square().sum()))
    torch.testing.assert_close(sample.sketch(x) + sample.sketch(y), sample.sketch(x + y), rtol=1e-4, atol=1e-4)
    spread = np.std(squares) / math.sqrt(len(squares))
    assert abs(np.mean(squares) - float(x.square().sum())) < 5 * spread
    assert np.std(squares) < 1.5 * math.sqrt(2 / STEPS.sketch) * np.mean(squares)


def test_a_sample_leaves_exempt_values_out() -> None:
    entries = (Entry("w", 0, 50_000, exempt=False), Entry("b", 50_000, 50_100, exempt=True))
    sample = Sample.drawn(BucketInfo(entries, 50_100), seed=1)
    assert (sample.label, sample.numel, len(sample.places)) == ("w", 50_000, RUNS * RUN)
    assert sample.places.max() < 50_000
    assert len(set(sample.places.tolist())) == RUNS * RUN


def test_errors_are_beside_the_noise_of_the_mean() -> None:
    layer = LayerNoise("w", 10, square=5.0, signal=1.0, noise=4.0, errors=(0.0, 0.5))
    assert layer.shares(2) == (0.0, (0.5 / 2 + 0.1 * (1 + 4 / 2)) / (4 / 2))
    assert LayerNoise("w", 10, 5.0, 5.0, -0.1, (0.0, 0.5)).shares(2) == (0.0, math.inf)
    assert LayerNoise("w", 10, 0.0, 0.0, 0.0, (0.0, 0.0)).shares(2) == (0.0, 0.0)


# the choice

SIZES = (32, 8, 4, 1)
LAYERS = st.lists(st.lists(st.floats(0, 5), min_size=3, max_size=3), min_size=1, max_size=5)


@given(LAYERS, st.floats(0.01, 2), st.floats(1, 3))
def test_a_choice_is_within_its_budget_and_nearly_the_smallest(
    errors: list[list[float]], budget: float, more: float
) -> None:
    shares = [[0.0, *row] for row in errors]
    count = len(shares)
    nbytes, weights = [SIZES] * count, [1 / count] * count

    def of(which: Any) -> tuple[int, float]:
        return sum(SIZES[i] for i in which), sum(row[i] for row, i in zip(shares, which, strict=True)) / count

    picked = choose_within(nbytes, shares, weights, budget)
    assert picked == choose_within(nbytes, shares, weights, budget)
    size, error = of(picked)
    assert error <= budget * (1 + 1e-9)
    assert all(row[i] <= PER_LAYER * budget for row, i in zip(shares, picked, strict=True))
    allowed = [[i for i, share in enumerate(row) if share <= PER_LAYER * budget] for row in shares]
    within = [of(which)[0] for which in itertools.product(*allowed) if of(which)[1] <= budget]
    assert size <= min(within) + count * SIZES[0] * (count > 1) + SIZES[0]
    if count == 1:  # one layer: the smallest on its hull, of which at most one step is missed
        assert size <= SIZES[0]


def test_cheap_errors_are_made_first() -> None:
    cheap, dear = [0.0, 0.01, 0.02, 0.1], [0.0, 0.1, 0.2, 1.0]
    assert choose_within([SIZES] * 2, [dear, cheap], [0.5, 0.5], 0.061) == [1, 2]
    assert choose_within([SIZES] * 2, [dear, cheap], [0.5, 0.5], 10.0) == [3, 3]
    assert choose_within([SIZES] * 2, [dear, cheap], [0.5, 0.5], 1e-6) == [0, 0]
    assert choose_within([SIZES], [[math.inf] * 4], [1.0], 1.0) == [0]


def _layer(noise: float, numel: int = 50_000) -> LayerNoise:
    return LayerNoise("w", numel, 1.0 + noise, 1.0, noise, tuple(np.linspace(0, 1, len(CANDIDATES))))


def test_a_choice_is_kept_until_another_is_clearly_smaller_and_given_up_over_the_budget() -> None:
    choice = NoiseCodec(0.5)
    choice.layers = {0: _layer(10.0), 1: _layer(1.0, 300)}
    choice._decide(12, 2, [0, 1], residual=1.0)
    assert [choice.codec_for(0, step) for step in (12, 13)] == [
        laconic.codec("dynamic8"),
        laconic.codec(choice.chosen[0]),
    ]
    first = dict(choice.chosen)
    choice.layers[1] = _layer(5.0, 300)  # a small layer could send less now: not worth another plan
    choice._decide(40, 2, [0, 1], residual=1.0)
    assert choice.chosen == first
    choice.layers[0] = _layer(0.5)  # the noise has gone
    choice._decide(72, 2, [0, 1], residual=1.0)
    assert CANDIDATES.index(choice.chosen[0]) < CANDIDATES.index(first[0])
    assert choice.share <= 0.5


def _reviewed(*residuals: float, losses: dict[int, float] | None = None) -> NoiseCodec:
    """A choice that was reviewed so often; `losses`: by review, what was reported before it."""
    choice = NoiseCodec(0.5)
    choice.layers = {0: _layer(2.0)}
    for number, residual in enumerate(residuals):
        if losses and number in losses:
            choice.loss.report(losses[number])
            choice.loss.follow(*choice.loss.take())
        choice._decide(12 + number, 2, [0], residual)
    return choice


def test_growing_residuals_halve_the_budget() -> None:
    steady, grown = _reviewed(1.0, 2.0, 2.0), _reviewed(1.0, 2.0, 9.0)
    assert (steady.allowed, "half" in steady.verdict) == (0.5, False)
    assert (grown.allowed, "half" in grown.verdict) == (0.25, True)
    assert steady.share <= 0.5
    assert grown.share <= 0.25
    assert grown.chosen != steady.chosen


def test_residuals_of_other_codecs_are_not_compared() -> None:
    """What dynamic8 leaves out is a thousandth of what int2 does: the first choice is not a growth."""
    first = _reviewed(1.0)
    assert first.chosen != {0: "dynamic8"}
    after = _reviewed(1.0, 1000.0)
    assert (after.allowed, after.chosen) == (0.5, first.chosen)
    halved = _reviewed(1.0, 2.0, 9.0, 0.001)  # by the codec of the halved budget: not known yet to be less
    assert halved.allowed == 0.25
    assert _reviewed(1.0, 2.0, 9.0, 0.001, 0.001).allowed == 0.5


def test_a_risen_loss_halves_the_budget_until_it_has_not() -> None:
    alike = [2.0] * 7
    assert _reviewed(*alike, losses={0: 1.0, 1: 1.01}).allowed == 0.5
    risen = _reviewed(*alike[:3], losses={0: 1.0, 1: 1.5, 2: 1.5})
    assert risen.allowed == 0.125
    assert risen.share <= 0.125
    assert "the reported loss has risen, so 1/4 of it" in risen.verdict
    assert _reviewed(*alike, losses={0: 1.0, 1: 1.5, 2: 1.5, 4: 0.9}).allowed == 0.25
    assert _reviewed(*alike, losses={0: 1.0, **dict.fromkeys(range(1, 7), math.nan)}).allowed == 0.0625  # at least
    assert _reviewed(2.0, losses={0: math.inf}).allowed == 0.25
    assert _reviewed(*alike, losses={0: -5.0, 1: -4.99, 2: -4.0}).allowed == 0.25


def test_windows() -> None:
    ends = [step for step in range(1500) if window_of(step) == WINDOW]
    assert ends == [12, 40, 72, 136, 264, 520, 776, 1032, 1288]
    assert all(window_of(end - 1 - back) == WINDOW - 1 - back for end in ends for back in range(WINDOW))


# training


def _model() -> nn.Module:
    model, generator = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)), torch.Generator()
    generator.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _trained(rank: int, door: str) -> dict[str, Any]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    trained: nn.Module = model
    job: Any
    if door == "compress":
        trained = DistributedDataParallel(model)
        job = laconic.compress(trained, "auto", quality="noise")
    else:
        job = laconic.distribute(model, optimizer, codec="auto", quality="noise", overlap=door == "overlap")
    _train(trained, optimizer, range(50), rank)
    text, metrics = job.explain(), job.metrics()
    state: CompressionState = job if door == "compress" else job.state
    noise = state.buckets.noise
    assert noise is not None
    job.finish()
    everyone = laconic.all_gather(_flat(model), algorithm="ring")
    found = {
        "alike": all(torch.equal(row, everyone[0]) for row in everyone), "chosen": noise.chosen, "text": text,
        "metrics": metrics, "layers": noise.layers,
    }  # fmt: skip
    job.close()
    return found


def _ranks(door: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = _trained(dist.get_rank(), door)
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("door", ["compress", "overlap", "in step"])
def test_ranks_choose_alike_and_end_with_the_same_bits(door: str) -> None:
    one, other = run_local(2, _ranks, (door,), timeout_s=100)
    assert one["alike"]
    assert one["chosen"] == other["chosen"]
    assert one["layers"] == other["layers"]
    assert any(spec != "dynamic8" for spec in one["chosen"].values())
    assert 0 < one["metrics"]["error_of_noise"] <= 0.2
    assert one["metrics"]["noise_scale"] > 0
    for word in ("signal", "noise", "error", "payload, B", "weight"):
        assert word in one["text"]


@pytest.mark.parametrize("kept_at", [7, 11, 12, 20])
def test_a_resumed_training_has_the_same_bits(kept_at: int) -> None:
    """In the middle of a window, at its end, before its review, and after it."""
    ended = REVIEWED + 18

    def begun(transport: Any, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        world = laconic.World(transport)
        return optimizer, laconic.distribute(
            model, optimizer, codec="auto", quality="noise", world=world, overlap=False
        )

    def work(transport: Any) -> None:
        whole, first = _model(), _model()
        optimizer, job = begun(transport, whole)
        _train(whole, optimizer, range(ended), transport.rank)
        noise = job.state.buckets.noise
        chosen, numbers, reviews = noise.chosen, noise.layers, noise.reviews
        assert [review.step for review in reviews] == [REVIEWED]
        wanted = _flat(whole)
        job.close()
        optimizer, job = begun(transport, first)
        _train(first, optimizer, range(kept_at), transport.rank)
        kept = copy.deepcopy(job.state_dict())
        job.close()
        optimizer, job = begun(transport, first)
        job.load_state_dict(kept)
        _train(first, optimizer, range(kept_at, ended), transport.rank)
        assert job.state.buckets.noise.layers == numbers
        assert job.state.buckets.noise.chosen == chosen
        assert job.state.buckets.noise.reviews == reviews
        assert torch.equal(_flat(first), wanted)
        job.close()

    run_threads(2, work)


def _begun(transport: Any, model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer, world = torch.optim.SGD(model.parameters(), 0.05), laconic.World(transport)
    given: dict[str, Any] = {"codec": "auto", "quality": "noise", "overlap": False, **options}
    return optimizer, laconic.distribute(model, optimizer, world=world, **given)


def test_a_reported_loss_that_rises_sends_more() -> None:
    """One rank reports, and all go back to more bits at the next review; resumed in between, too."""

    def work(transport: Any) -> tuple[list[float], list[int], float | str]:
        model = _model()
        optimizer, job = _begun(transport, model)
        if transport.rank == 1:
            job.report_loss(1.0)
        _train(model, optimizer, range(30), transport.rank)
        if transport.rank == 1:
            job.report_loss(5.0)
        kept = copy.deepcopy(job.state_dict())
        job.close()
        optimizer, job = _begun(transport, model)
        job.load_state_dict(kept)
        _train(model, optimizer, range(30, 42), transport.rank)
        noise, allowed = job.state.buckets.noise, job.metrics()["error_allowed"]
        job.close()
        return [review.share for review in noise.reviews], [review.nbytes for review in noise.reviews], allowed

    one, other = run_threads(2, work)
    assert one == other
    (_, share), (before, after), allowed = one
    assert allowed == 0.1
    assert share <= 0.1
    assert after >= before


@pytest.mark.parametrize("overlap", [False, True])
def test_a_nan_in_a_window_changes_no_choice(overlap: bool) -> None:
    """NaN in one rank's gradients: the choice stays, and the next window is measured as ever."""

    def work(transport: Any) -> tuple[list[int], str, str, bool]:
        model = _model()
        optimizer, job = _begun(transport, model, overlap=overlap)
        _train(model, optimizer, range(35), transport.rank)
        noise, weights = job.state.buckets.noise, copy.deepcopy(model.state_dict())
        chosen, metrics = dict(noise.chosen), noise.metrics()
        optimizer.zero_grad()
        x = torch.randn(4, 64)
        (model(x).sum() * (math.nan if transport.rank else 1.0)).backward()
        optimizer.step()
        model.load_state_dict(weights)  # as a loop does that skips such a step
        _train(model, optimizer, range(36, 41), transport.rank)
        job.state_dict()  # ends what is under way
        between = noise.verdict
        assert (noise.chosen, noise.metrics()) == (chosen, metrics)
        _train(model, optimizer, range(41, 74), transport.rank)
        finite = bool(_flat(model).isfinite().all())
        job.close()
        return [review.step for review in noise.reviews], between, noise.verdict, finite

    one, other = run_threads(2, work)
    assert one == other
    assert one[1] == "kept: gradients were not finite"
    assert one[0] == [12, 72]
    assert one[2].startswith("reviewed at step 72")
    assert one[3]


UNUSUAL = ("batch norm", "frozen layer", "layer without gradients", "sparse gradients", "accumulation")


class _Unusual(nn.Module):
    """Three layers, each with a bucket of its own, and one thing that is not as usual."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first = nn.Embedding(150, 128, sparse=case == "sparse gradients")
        self.middle = nn.BatchNorm1d(128) if case == "batch norm" else nn.Linear(128, 128)
        self.last = nn.Linear(128, 128)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 8)
        if case == "frozen layer":
            self.middle.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(rows)
        return self.last(x + 0 * self.middle(x) if self.case == "layer without gradients" else self.middle(x))


def _train_unusual(model: nn.Module, job: Any, optimizer: torch.optim.Optimizer, case: str, rank: int) -> None:
    parts = 2 if case == "accumulation" else 1
    for step in range(42):
        optimizer.zero_grad()
        for part in range(parts):
            drawn = torch.Generator().manual_seed(100 * step + 10 * rank + part)
            last = part == parts - 1
            with contextlib.nullcontext() if last or not hasattr(job, "no_sync") else job.no_sync():
                model(torch.randint(150, (6,), generator=drawn)).square().mean().backward()
        optimizer.step()


def _check_unusual(case: str, noise: NoiseCodec, *, expected: set[str]) -> dict[str, str]:
    """Which codec each bucket has: those without signal are not lost, all others were chosen."""
    assert len(noise.reviews) > 1
    chosen = {layer.label: noise.chosen[b] for b, layer in noise.layers.items()}
    idle = {layer.label for layer in noise.layers.values() if layer.square == 0}
    assert {label.split(".")[0] for label in " ".join(chosen).split()} == expected, case
    assert {label.split(".")[0] for label in idle} == {"middle"} & expected & (
        {"middle"} if case in ("layer without gradients", "frozen layer") else set()
    )
    assert all(chosen[label] == "dynamic8" for label in idle)
    return chosen


@pytest.mark.parametrize("mode", ["sync", "overlap", "diloco(2)"])
@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_not_as_usual_is_handled(case: str, mode: str) -> None:
    """In flat buffers sparse gradients are dense, and a mode of blocks sees a frozen layer that never moves."""
    blocks = mode == "diloco(2)"
    given: dict[str, Any] = {"overlap": mode == "overlap" or None}
    given |= {"consistency": mode, "period": "auto"} if blocks else {}
    without = case == "batch norm" or (case == "frozen layer" and not blocks)

    def work(transport: Any) -> tuple[Tensor, dict[str, str]]:
        model = _Unusual(case)
        optimizer, job = _begun(transport, model, **{**given, "overlap": given["overlap"] if not blocks else None})
        _train_unusual(model, job, optimizer, case, transport.rank)
        job.finish()
        noise = (job.averagers[0] if blocks else job).state.buckets.noise
        chosen = _check_unusual(case, noise, expected={"first", "last"} | (set() if without else {"middle"}))
        job.close()
        return _flat(model), chosen

    (weights, chosen), (others, other) = run_threads(2, work)
    assert torch.equal(weights, others)
    assert chosen == other


def _unusual_ranks() -> dict[str, Any]:
    """All cases by `compress`, one after the other, in the same processes."""
    dist.init_process_group("gloo")
    found = {}
    for case in UNUSUAL:
        model = DistributedDataParallel(_Unusual(case))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with laconic.compress(model, "auto", quality="noise") as job:
            _train_unusual(model, model, optimizer, case, dist.get_rank())
            without = {"batch norm": {"middle"}, "frozen layer": {"middle"}, "sparse gradients": {"first"}}
            expected = {"first", "middle", "last"} - without.get(case, set())
            noise = job.buckets.noise  # type: ignore[attr-defined]
            chosen = _check_unusual(case, noise, expected=expected)
        everyone = laconic.all_gather(_flat(model), algorithm="ring")
        found[case] = (chosen, torch.equal(everyone[0], everyone[1]))
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_what_is_not_as_usual_is_handled_by_compress() -> None:
    """A sparse gradient goes past all codecs."""
    one, other = run_local(2, _unusual_ranks, (), timeout_s=100)
    assert one == other
    assert all(alike for _, alike in one.values())


def test_one_worker_has_nothing_to_measure() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with laconic.distribute(model, optimizer, codec="auto", quality="noise") as job:
        _train(model, optimizer, range(REVIEWED + 2), 0)
        assert "one worker has no others" in job.explain()


def test_wrong_use() -> None:
    for quality, sentence in (
        ("noise(0)", "the budget of quality 'noise' is above 0"),
        ("noise(11)", "at most 10"),
        ("noise(true)", "budget is a number"),
        ("noise(share=1)", "budget"),
    ):
        with pytest.raises((BadInput, UnknownName), match=sentence):
            CompressionState("auto", options=Options(quality=quality))
    with pytest.raises(BadInput, match="counts on feedback"):
        CompressionState("auto", options=Options(quality="noise", feedback=False))
    with pytest.raises(BadInput, match="leave momentum to the optimiser"):
        CompressionState("auto", _model().named_parameters(), Options(quality="noise", momentum=0.9))
    with pytest.raises(BadInput, match="goes with codec 'auto'"):
        CompressionState("dynamic8", options=Options(quality="noise"))
    with pytest.raises(BadInput, match="the state of quality 'noise'"):
        NoiseCodec().check_state({"layers": 3})
    state = NoiseCodec().state_dict()
    with pytest.raises(BadInput, match="candidates"):
        NoiseCodec().check_state({**state, "chosen": {"0": "powersgd(4)"}})
