"""Workloads: every registered one is described, seeded and divided among ranks as the trainer assumes; the quick ones
reach the target they declare."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from laconic import workloads
from laconic.errors import BadInput, UnknownName
from laconic.workloads import Task
from laconic.workloads.data import Dataset, SparseRows, Split
from laconic.workloads.inputs import Pixels, ShiftedPixels
from laconic.workloads.objective import CLASSIFICATION, NEXT_CHARACTER, REGRESSION
from laconic.workloads.optimizers import linear_decay, steps_down, warmed_up

REAL = os.environ.get("LACONIC_DATA")
DETERMINISTIC = [  # neither dropout nor batch normalisation, by which a sample's gradient depends on more than itself
    name for name in workloads.names() if name not in ("mnist-mlp", "cifar-resnet")
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are slower on several threads, much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made_split(name: str, samples: int, seed: int) -> Split:
    """Random samples shaped like those of a dataset."""
    random = np.random.default_rng(seed)
    shapes = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "fashion": (1, 28, 28), "cifar10": (3, 32, 32)}
    if name == "shakespeare":
        windows = torch.from_numpy(random.integers(0, 65, (samples, 13), dtype=np.uint8))
        return Split(windows[:, :-1], windows[:, 1:])
    if name == "rcv1":
        columns = torch.from_numpy(random.integers(0, 47_236, 5 * samples))
        rows = SparseRows(torch.arange(samples + 1) * 5, columns, torch.rand(5 * samples), 47_236)
        return Split(rows, torch.from_numpy(random.integers(0, 2, samples)).float())
    if name == "linear":
        return Split(0.1 * torch.randn(samples, 1000), torch.randn(samples))
    pixels = random.integers(0, 16 if name == "digits" else 256, (samples, *shapes[name]), dtype=np.uint8)
    return Split(torch.from_numpy(pixels), torch.from_numpy(random.integers(0, 10, samples)))


def made_task(name: str, batch: int = 6, samples: int = 16, seed: int = 3, **changes: object) -> Task:
    workload = replace(workloads.get(name), batch=batch, **changes)
    dataset = Dataset(workload.dataset, "made", "made", *(made_split(workload.dataset, samples, s) for s in (0, 1)))
    return workload.prepare(seed, dataset)


def gradient(task: Task, epoch: int, step: int, rank: int, world_size: int) -> torch.Tensor:
    task.model.zero_grad()
    task.loss(task.model, task.batch(epoch, step, rank, world_size)).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in task.model.parameters()])


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_mean_gradient_of_the_ranks_is_that_of_one_process(name: str) -> None:
    """The oracle: 16 samples in 3 steps of 5 or 6, divided among 1 to 7 ranks, whose shares may be empty."""
    task = made_task(name)
    assert task.steps_per_epoch(1) == task.steps_per_epoch(7) == 3
    for world_size, step in ((2, 0), (3, 1), (7, 2)):
        alone = gradient(task, 1, step, 0, 1)
        mean = sum(gradient(task, 1, step, rank, world_size) for rank in range(world_size)) / world_size
        assert float(alone.norm()) > 0
        # float32 sums in another order
        torch.testing.assert_close(mean, alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("name", workloads.names())
def test_every_workload_trains_a_step_and_is_described(name: str) -> None:
    task = made_task(name, batch=16)
    assert workloads.summary(name)
    optimizer = task.optimizer(task.model.parameters())
    before = task.evaluate(task.model, "train")
    batch = task.batch(0, 0)
    losses = []
    for _ in range(8):  # one batch again and again, without the rate's warm-up: the loss must fall
        task.begin_step(optimizer, 0, 0)
        for group in optimizer.param_groups:
            group["lr"] = min(task.workload.learning_rate, 0.02)
        optimizer.zero_grad()
        loss = task.loss(task.model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    scores = task.evaluate(task.model, "train")
    assert set(scores) == set(before)
    assert task.workload.objective.metric in scores
    described = task.describe(world_size=4)
    assert described.name == name
    assert described.parameters > 0
    assert described.batch_per_worker == 4
    assert described.precision == "float32"
    assert described.input_shape is not None
    assert f"{task.workload.target:g}" in described.stopping_rule


@pytest.mark.parametrize("name", workloads.names())
def test_the_start_is_decided_by_the_seed_alone(name: str) -> None:
    workload = workloads.get(name)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = workload.build(5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = workload.build(5).state_dict(), workload.build(6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    if name not in ("linear", "rcv1-logistic"):  # these start at zero
        assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["digits-mlp", "cifar-convnet"])
def test_batches_are_the_same_samples_for_every_world_size_and_in_any_order_of_asking(name: str) -> None:
    task = made_task(name)
    whole = task.batch(2, 1)
    for world_size in (2, 5):
        shares = [task.batch(2, 1, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat([share.x for share in shares]), whole.x)
        assert torch.equal(torch.cat([share.y for share in shares]), whole.y)
    assert not torch.equal(task.batch(0, 1).x, whole.x)
    assert torch.equal(task.batch(2, 1).x, whole.x)
    assert torch.equal(made_task(name).batch(2, 1).x, whole.x)
    assert not torch.equal(made_task(name, seed=4).batch(2, 1).x, whole.x)


def test_weak_scaling_gives_each_worker_a_batch() -> None:
    workload = replace(workloads.get("digits-mlp"), batch=4)
    dataset = Dataset("digits", "made", "made", *(made_split("digits", 16, s) for s in (0, 1)))
    task = workload.prepare(0, dataset, "weak")
    assert [task.steps_per_epoch(world_size) for world_size in (1, 2, 4)] == [4, 2, 1]
    assert len(task.batch(0, 0, 1, 2).y) == 4
    assert task.describe(4).batch_per_worker == 4


def test_begin_step_sets_the_rate_and_the_random_state() -> None:
    task = made_task("mnist-mlp", samples=12, batch=6)
    optimizer = task.optimizer(task.model.parameters())
    task.begin_step(optimizer, 5, 0, rank=1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.003 * (1 - 5 / task.workload.epochs))
    first = torch.rand(3)
    for place, same in (((5, 0, 1), True), ((5, 1, 1), False), ((5, 0, 0), False), ((4, 0, 1), False)):
        task.begin_step(optimizer, *place)
        assert torch.equal(torch.rand(3), first) == same


def test_training_resumes_anywhere_with_model_and_optimizer_alone() -> None:
    def steps(task: Task, optimizer: torch.optim.Optimizer, places: list[tuple[int, int]]) -> None:
        for epoch, step in places:
            task.begin_step(optimizer, epoch, step)
            optimizer.zero_grad()
            task.loss(task.model, task.batch(epoch, step)).backward()
            optimizer.step()

    places = [(epoch, step) for epoch in range(2) for step in range(3)]
    whole = made_task("mnist-mlp")  # has dropout
    optimizer = whole.optimizer(whole.model.parameters())
    steps(whole, optimizer, places[:4])
    saved = {key: value.clone() for key, value in whole.model.state_dict().items()}
    state = torch.optim.Optimizer.state_dict(optimizer)
    state = {**state, "state": {key: {k: v.clone() for k, v in entry.items()} for key, entry in state["state"].items()}}
    steps(whole, optimizer, places[4:])

    resumed = made_task("mnist-mlp")
    resumed.model.load_state_dict(saved)
    again = resumed.optimizer(resumed.model.parameters())
    again.load_state_dict(state)
    steps(resumed, again, places[4:])
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_evaluation_is_whole_and_puts_the_mode_back() -> None:
    task = made_task("digits-mlp", samples=1203)  # more than two evaluation batches
    task.model.train()
    scores = task.evaluate(task.model)
    assert task.model.training
    x, y = task.data.test.x.float() / 16, task.data.test.y
    output = task.model(x)
    assert scores["accuracy"] == pytest.approx(float((output.argmax(1) == y).float().mean()), abs=1e-6)
    assert scores["loss"] == pytest.approx(torch.nn.functional.cross_entropy(output, y).item(), rel=1e-5)


def test_objectives_know_which_way_is_better() -> None:
    assert CLASSIFICATION.reached({"accuracy": 0.9, "loss": 1.0}, 0.9)
    assert not CLASSIFICATION.reached({"accuracy": 0.89, "loss": 0.0}, 0.9)
    assert REGRESSION.reached({"loss": 0.1}, 0.2)
    assert not REGRESSION.reached({"loss": float("nan")}, 0.2)
    assert NEXT_CHARACTER.scores(np.log(2) * 3, 0.5) == pytest.approx(
        {"loss": np.log(2) * 3, "accuracy": 0.5, "bits per character": 3.0}
    )


def test_schedules() -> None:
    assert [linear_decay(p) for p in (0.0, 0.25)] == [1.0, 0.75]
    falls = steps_down(0.5, 0.75)
    assert [falls(p) for p in (0.49, 0.5, 0.75)] == pytest.approx([1, 0.1, 0.01])
    rises = warmed_up(0.1, falls)
    assert rises(0.0) == pytest.approx(0.1)
    assert rises(0.0) < rises(0.05) < rises(0.1) == 1.0


def test_shifts_cut_a_window_and_mirror_it() -> None:
    images = torch.arange(2 * 6 * 6).reshape(2, 1, 6, 6).to(torch.uint8)
    inputs = ShiftedPixels(Pixels(largest=1.0), size=4, padding=0)
    assert torch.equal(inputs(images), images[:, :, 1:5, 1:5].float())
    draws = torch.tensor([[0.0, 0.99999, 0.0], [0.5, 0.0, 0.9]])  # corner (0, 2) as it is; corner (1, 0) mirrored
    cut = inputs(images, draws)
    assert torch.equal(cut[0], images[0, :, 0:4, 2:6].float())
    assert torch.equal(cut[1], images[1, :, 1:5, 0:4].flip(2).float())
    padded = ShiftedPixels(Pixels(largest=1.0), size=6, padding=1)
    assert torch.equal(padded(images), images.float())
    assert padded(images, torch.zeros(2, 3))[0, 0, 0].tolist() == [0.0] * 6  # the border above the image


def test_shifts_are_those_of_the_seed_and_the_epoch() -> None:
    inputs = ShiftedPixels(Pixels(), size=24, padding=0)
    first = inputs.draws(5, seed=1, epoch=2)
    assert torch.equal(inputs.draws(5, seed=1, epoch=2), first)
    assert not torch.equal(inputs.draws(5, seed=2, epoch=2), first)
    assert not torch.equal(inputs.draws(5, seed=1, epoch=3), first)


def test_depth_is_an_argument() -> None:
    workload = workloads.get("cifar-resnet( 110 )")
    assert workload.name == workload.model == "cifar-resnet(110)"
    assert workload.slug == "cifar-resnet-110"
    with pytest.raises(BadInput, match="6n"):
        workloads.get("cifar-resnet(100)")


def test_sizes_of_a_transformer_are_arguments() -> None:
    workload = workloads.get("shakespeare-gpt(2, width=32, length=16, tied=false)")
    model = workload.build(0)
    assert (len(model.blocks), model.places.weight.shape) == (2, (16, 32))
    assert model.head.weight is not model.characters.weight
    assert workload.data_options == (("length", 16),)
    groups = workload.optimizer(model.parameters(), 0.1).param_groups
    decays = {group["weight_decay"]: len(group["params"]) for group in groups}
    assert decays == {0.1: 2 * 4 + 3, 0.0: 2 * 2 + 1}


@pytest.mark.parametrize("spec", ["digits-mlp(3)", "digits", "cifar-resnet(depth=", "linear(speed=1)"])
def test_specs_that_name_nothing(spec: str) -> None:
    with pytest.raises(BadInput):
        workloads.get(spec)


def test_an_unknown_workload_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'digits-mlp'.*cifar-resnet"):
        workloads.get("digits-mpl")


@pytest.mark.parametrize(("seed", "scaling"), [(-1, "strong"), (0, "sideways"), (1.5, "weak")])
def test_bad_seeds_and_scalings(seed: int, scaling: str) -> None:
    with pytest.raises(BadInput):
        workloads.get("digits-mlp").prepare(seed, scaling=scaling)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "linear", "rcv1-logistic"])
def test_the_quick_ones_reach_their_target(name: str) -> None:
    workload = workloads.get(name)
    if name == "rcv1-logistic" and not REAL:
        pytest.skip("LACONIC_DATA is not set: no RCV1 on this machine")
    task = workload.prepare(seed=0, data=REAL if name == "rcv1-logistic" else None)
    optimizer = task.optimizer(task.model.parameters())
    for epoch in range(workload.epochs):
        for step in range(task.steps_per_epoch()):
            task.begin_step(optimizer, epoch, step)
            optimizer.zero_grad()
            task.loss(task.model, task.batch(epoch, step)).backward()
            optimizer.step()
    assert task.reached(task.evaluate(task.model))


def test_a_users_own_factory_is_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_things.py").write_text(
        "from dataclasses import replace\n"
        "from laconic import workloads\n"
        "def short(epochs: int = 2):\n"
        "    return replace(workloads.get('digits-mlp'), epochs=epochs)\n"
        "def nothing():\n"
        "    return 3\n"
        "number = 7\n"
    )
    (tmp_path / "broken_things.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    workload = workloads.get("own_things:short( 3 )")
    assert (workload.name, workload.slug, workload.epochs) == ("own_things:short(3)", "own-things-short-3", 3)
    for spec, sentence in [
        ("own_thing:short", "module 'own_thing' cannot be imported: ModuleNotFoundError"),
        ("broken_things:short", "module 'broken_things' cannot be imported: ModuleNotFoundError.*no_such_package"),
        ("own_things:long", "module 'own_things' has no 'long'"),
        ("own_things:number", "'number' is a int, not a function that makes a Workload"),
        ("own_things:nothing", "'nothing' made a int, not a laconic.workloads.Workload"),
        ("own_things:short(x)", "epochs is a whole number, got 'x'"),
        ("own_things:short(depth=3)", "unknown option of workload 'short' 'depth'"),
        ("own_things:", "not of the form name"),
        (":short", "module '' cannot be imported"),
    ]:
        with pytest.raises(BadInput, match=sentence):
            workloads.get(spec)
