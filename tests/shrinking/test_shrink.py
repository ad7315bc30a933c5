"""From a model to a small file and back: prune, share, retrain, search, load, run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as torch_prune

import laconic
from laconic.errors import BadInput, BudgetMissed, StorageError, UnknownName
from laconic.shrinking import Plan, factorise, file, prune, retrain, sparse_layers
from laconic.shrinking.parts import Shared
from laconic.shrinking.share import METHODS, _cuts, build, share
from laconic.shrinking.training import TaskTraining, error_of
from laconic.workloads import Task, get


@pytest.fixture(scope="module")
def task() -> Task:
    """A trained network on the bundled digits."""
    found = get("digits-mlp").prepare(seed=0)
    TaskTraining(found, 6, 1.0)(found.model)
    return found


def test_the_door_shows_its_arguments() -> None:
    """What `help` and an editor show of `laconic.shrink`; what goes with it is in the package."""
    assert list(inspect.signature(laconic.shrink).parameters)[:4] == ["model", "train", "evaluate", "budget"]
    assert "how much the error may rise" in (inspect.getdoc(laconic.shrink) or "")
    assert laconic.shrinking.Plan is Plan


# Prune.
def test_masks_keep_the_largest() -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(20, 30, generator=rng), "b": 5 * torch.randn(10, 30, generator=rng)}
    for scope in prune.SCOPES:
        masks = prune.magnitude(tensors, 0.2, scope=scope)
        assert sum(int(mask.sum()) for mask in masks.values()) == 180
        for name, mask in masks.items():
            assert tensors[name][mask].abs().min() >= tensors[name][~mask].abs().max()
    assert prune.magnitude(tensors, 0.2, scope="global")["a"].sum() < 10 < prune.magnitude(tensors, 0.2)["a"].sum()
    rows = prune.magnitude(tensors, {"a": 0.25}, structured=True)
    assert rows["a"].any(1).sum() == 5
    assert rows["b"].all()
    assert torch.equal(rows["a"].any(1), rows["a"].all(1))


def test_bad_plans_are_refused() -> None:
    model = nn.Linear(3, 3)
    for plan, words in ((lambda: Plan(density=0.0), "density"), (lambda: Plan(density={"nothing": 0.5}), "nothing"),
                        (lambda: Plan(density=0.5, scope="here"), "lamp"), (lambda: Plan(bits=12), "bits"),
                        (lambda: Plan(share="kmean"), "kmeans"), (lambda: Plan(rounds=0), "round"),
                        (lambda: Plan(small_bits=1), "small_bits"), (lambda: Plan(bit_price=-1), "price"),
                        (lambda: Plan(density="0.5"), "density"), (lambda: Plan(bits=2.5), "bits"),
                        (lambda: Plan(share="ternary", bits=4), "no bits")):  # fmt: skip
        with pytest.raises((BadInput, UnknownName), match=words):
            laconic.shrink(model, plan=plan())
    with pytest.raises(BadInput, match="budget"):
        laconic.shrink(model, budget=-1)
    nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(BadInput, match="NaN"):
        laconic.shrink(model)


def test_a_bad_plan_fails_when_it_is_made() -> None:
    """And not after the first training."""
    for options in ({"density": 2.0}, {"density": {"weight": 0.0}}, {"scope": "here"}, {"density": float("nan")}):
        with pytest.raises((BadInput, UnknownName)):
            Plan(**options)
    with pytest.raises(UnknownName, match="nothing"):
        laconic.shrink(nn.Linear(3, 3), train=lambda model: pytest.fail("trained"), plan=Plan(bits={"nothing": 3}))


def test_what_cannot_be_shrunk_is_said_before_training() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

    pruned = nn.Linear(3, 3)
    torch_prune.random_unstructured(pruned, "weight", 0.5)
    cases: list[tuple[Any, str]] = [
        (nn.Linear(3, 3).state_dict(), "torch.nn.Module, got OrderedDict"), (nn.Linear(3, 3).bfloat16(), r"float\(\)"),
        (nn.Linear(3, 3, device="meta"), "no values"), (nn.LazyLinear(3), "'weight' is UninitializedParameter"),
        (Counting(3, 3), "'_extra_state' is dict"), (nn.Linear(3, 3, dtype=torch.complex64), "complex64"),
        (pruned, "prune.remove"),
    ]  # fmt: skip
    for model, words in cases:
        with pytest.raises(BadInput, match=words):
            laconic.shrink(model, train=lambda model: pytest.fail("trained"), plan=Plan(density=0.5))
    exact = laconic.shrink(nn.Linear(3, 3).bfloat16(), plan=Plan(share="none"))
    assert exact.parts["weight"].dense().dtype == torch.bfloat16


@pytest.mark.parametrize("evaluate", [0.5, lambda model: None, lambda model: torch.ones(2), lambda model: "low"])
def test_an_error_is_one_number(evaluate: Any) -> None:
    with pytest.raises(BadInput, match="evaluate"):
        laconic.shrink(nn.Linear(3, 3), None, evaluate)


def test_a_spec_has_its_own_bits() -> None:
    model = nn.Linear(40, 30)
    assert len(laconic.shrink(model, plan=Plan(share="kmeans(2)")).parts["weight"].dense().unique()) == 4
    assert Plan(share="kmeans(2)", bits=3).bits == 3
    trained: list[int] = []
    plan = Plan(share="ternary", density=0.5, rounds=1)
    with pytest.raises(BudgetMissed):
        laconic.shrink(model, lambda model: trained.append(1), lambda model: float(len(trained)), plan=plan)
    assert len(trained) == 2  # pruned, then shared: there are no bits to search for


def test_a_folder_that_cannot_be_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        laconic.shrink(
            nn.Linear(3, 3), lambda model: pytest.fail("trained"), lambda model: 0.1, folder=tmp_path / "file"
        )


def test_a_model_without_matrices_is_only_coded() -> None:
    assert laconic.shrink(nn.LayerNorm(4), plan=Plan(density=0.5)).parts.keys() == {"weight", "bias"}


# Share.
@pytest.mark.parametrize("spec", METHODS.names())
def test_sharing_leaves_few_values_near_the_weights(spec: str) -> None:
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    mask = weight.abs() > 0.5
    part = share(weight, build(spec, 4), mask)
    dense = part.dense()
    assert not dense[~mask].any()
    assert len(dense.unique()) <= 18
    assert (dense - weight * mask).norm() < 0.6 * (weight * mask).norm()


def test_kmeans_matches_the_plain_algorithm() -> None:
    """Lloyd's algorithm over all distances gives the same centroids."""
    weight = np.random.default_rng(0).normal(size=200).astype(np.float32)
    centroids = np.linspace(weight.min(), weight.max(), 8).astype(np.float64)
    for _ in range(50):
        nearest = np.abs(weight[:, None] - centroids).argmin(1)
        centroids = np.array([weight[nearest == k].mean() if (nearest == k).any() else c
                              for k, c in enumerate(centroids)])  # fmt: skip
    values, numbers = build("kmeans(3)").values(weight)
    np.testing.assert_allclose(values[numbers], centroids[nearest], rtol=2e-3, atol=1e-4)


def test_linear_start_is_the_best_for_large_weights() -> None:
    """Few weights are large, and linear keeps centroids for them: the paper's reason."""
    weight = np.random.default_rng(0).standard_t(4, 5000).astype(np.float32)
    worst = {}
    for start in ("linear", "density", "random"):
        values, numbers = build(f"kmeans(4, {start}, rounds=5)").values(weight)
        worst[start] = np.abs(values[numbers] - weight).max()
    assert worst["linear"] < worst["density"]
    assert worst["linear"] < worst["random"]


@pytest.mark.parametrize("bit_price", [0.5, 2.0])
def test_a_price_of_bits_is_paid_in_error(bit_price: float) -> None:
    rng = np.random.default_rng(5)
    weight = rng.normal(size=(60, 50)).astype(np.float32)
    mask = np.abs(weight) > 1.0
    plain = share(torch.from_numpy(weight), build("kmeans(4)"), torch.from_numpy(mask))
    found = share(torch.from_numpy(weight), build("kmeans(4)"), torch.from_numpy(mask), bit_price)

    def bits_and_error(part: Shared) -> tuple[float, float]:
        shares = np.bincount(part.symbols.ravel()) / weight.size
        bits = -(shares * np.log2(np.maximum(shares, 1e-9))).sum() * weight.size
        return bits, np.square(part.dense().numpy() - weight)[mask].sum()

    (bits, error), (fewer, more) = bits_and_error(plain), bits_and_error(found)
    assert fewer < bits
    price = bit_price * error / mask.sum()
    assert error < more < error + price * (bits - fewer)
    assert not found.symbols[~mask].any()


@given(st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=9, unique=True), st.integers(0, 9))
def test_every_weight_takes_the_cheapest_value(values: list[float], seed: int) -> None:
    rng, centres = np.random.default_rng(seed), np.sort(values)
    costs, weights = rng.exponential(size=centres.size), rng.normal(scale=3, size=200)
    numbers = np.searchsorted(_cuts(centres, costs)[1:-1], weights, side="right")
    prices = np.square(weights[:, None] - centres) + costs
    assert prices[np.arange(200), numbers] == pytest.approx(prices.min(1))


def test_a_price_that_nothing_is_worth_prunes_all() -> None:
    weight = torch.tensor([0.5, 0.7, -1.0, -1.2, *[0.0] * 16]).reshape(4, 5)
    assert not share(weight, build("kmeans(1)"), weight != 0, bit_price=1e9).dense().any()


def test_values_too_small_for_float16_are_kept() -> None:
    weight = 1e-9 * torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    found = share(weight, build("kmeans(8)")).dense()
    assert (found - weight).abs().max() < 0.05 * weight.abs().max()


# Retrain.
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1)])
def test_pruned_weights_stay_pruned(optimizer: type[torch.optim.Optimizer]) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(8, 6)
    masks = prune.magnitude(prune.weights(model), 0.4)
    with retrain.masked(model, masks):
        trained = optimizer(model.parameters())
        for _ in range(5):
            trained.zero_grad()
            model(x).square().sum().backward()
            trained.step()
            assert not model[0].weight[~masks["0.weight"]].any()
    assert type(model[0]) is nn.Linear
    assert not model[0].weight[~masks["0.weight"]].any()
    assert model[0].weight[masks["0.weight"]].all()


def test_values_move_by_the_mean_of_gradients() -> None:
    model = nn.Linear(6, 4, bias=False)
    parts = {"weight": share(model.weight, build("kmeans(2)"), torch.rand(4, 6) < 0.7)}
    symbols, values = parts["weight"].symbols, parts["weight"].values.copy()
    x = torch.randn(3, 6)
    plain = nn.Linear(6, 4, bias=False)
    plain.weight.data.copy_(parts["weight"].dense())
    plain(x).square().sum().backward()
    assert plain.weight.grad is not None
    wanted = [values[k] - 0.01 * float(plain.weight.grad.numpy()[symbols == k].mean()) for k in range(1, len(values))]
    with retrain.shared(model, parts):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model(x).square().sum().backward()
        optimizer.step()
    np.testing.assert_allclose(parts["weight"].values[1:], wanted, rtol=2e-3)
    assert torch.equal(model.weight.detach(), parts["weight"].dense())


def test_a_rate_that_suits_weights_suits_values() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(256, 64)
    wanted = model(x).detach()
    parts = {"weight": share(model.weight, build("kmeans(2)"), torch.ones(64, 64, dtype=torch.bool))}
    losses = []
    with retrain.shared(model, parts):
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        for _ in range(30):
            optimizer.zero_grad()
            loss = (model(x) - wanted).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] <= losses[0]


def test_gradients_of_before_do_not_count() -> None:
    """Those of the given model, or of weights whose shape was another while they were trained."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 4), torch.randn(3, 6)
    model(x).square().sum().backward()

    def train(model: nn.Module) -> None:
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.01).step()

    small = laconic.shrink(model, train, plan=Plan(bits=2))
    assert all(p.grad is None or p.grad.shape == p.shape for p in small.model.parameters())
    model.zero_grad()
    assert file.dumps(laconic.shrink(model, train, plan=Plan(bits=2)).parts) == file.dumps(small.parts)


class _Tied(nn.Module):
    """As language models are: the table of words is the last layer's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 6), nn.Linear(6, 12)
        self.head.weight = self.words.weight
        self.gain, self.again = nn.LayerNorm(6), nn.LayerNorm(6)
        self.again.weight = self.gain.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.again(self.gain(self.words(x))))
        return result


def test_tied_weights_are_pruned_and_shared_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, zeros = _Tied(), torch.arange(12), []

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x.flip(0)).backward()
            optimizer.step()
            zeros.append(int((model.head.weight == 0).sum()))  # type: ignore[union-attr]

    small = laconic.shrink(model, train, plan=Plan(density=0.5, bits=4, rounds=1))
    assert min(zeros) == 36  # in both places while it trains
    assert small.model.head.weight is small.model.words.weight  # type: ignore[union-attr]
    assert small.parts["head.weight"] is small.parts["words.weight"]
    assert isinstance(small.parts["head.weight"], Shared)
    assert [n for n, _ in small.model.named_parameters()] == [n for n, _ in model.named_parameters()]
    small.save(tmp_path / "a.lac")
    loaded = laconic.load_shrunk(tmp_path / "a.lac", into=_Tied(), sparse="never")
    assert torch.equal(loaded(x), small.model(x))
    with torch.device("meta"):
        empty = _Tied()
    loaded = laconic.load_shrunk(tmp_path / "a.lac", into=empty, sparse="never")
    assert torch.equal(loaded(x), small.model(x))
    assert loaded.head.weight is loaded.words.weight
    assert loaded.again.weight is loaded.gain.weight


def test_parameters_keep_their_order() -> None:
    """An optimiser's state and a bucket's places follow it."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 3))
    small = laconic.shrink(model, train=lambda m: None, plan=Plan(density=0.5, bits=2, rounds=1))
    assert [n for n, _ in small.model.named_parameters()] == [n for n, _ in model.named_parameters()]


# The door.
def test_whole_filters_are_pruned(task: Task) -> None:
    plan = Plan(density=0.4, structured=True, bits=4, rounds=2)
    small = laconic.shrink(task.model, TaskTraining(task, 1), budget=0.5, plan=plan)
    hidden = small.parts["layers.3.weight"].dense()
    assert 0 < hidden.any(1).sum() < 200
    assert torch.equal(hidden.any(1), hidden.bool().sum(1) > 150)  # a row is there, but for values shared as zero
    assert 0.3 < small.report().density < 0.45


def test_a_teacher_retrains(task: Task) -> None:
    """`laconic.consistency.distill.distill` with the dense model as the teacher is a way to train."""

    def train(student: nn.Module) -> None:
        optimizer = torch.optim.SGD(student.parameters(), 0.01, momentum=0.9)
        batches = (task.batch(0, step) for step in range(task.steps_per_epoch()))
        pairs = ((each.x, each.y) for each in batches)
        laconic.consistency.distill.distill(task.model, student, pairs, optimizer, temperature=1.0)

    plan = Plan(density=0.05, bits=3, rounds=2)
    small = laconic.shrink(task.model, train, error_of(task), 1.0, plan=plan)
    untaught = laconic.shrink(task.model, lambda student: None, error_of(task), 1.0, plan=plan)
    assert small.error < untaught.error


def test_a_shrunk_model_ships(task: Task, tmp_path: Path) -> None:
    """`my pruned file is the same size and no faster`: here it is smaller, plain torch runs it, to the same bits."""
    small = laconic.shrink(task.model, TaskTraining(task, 2), budget=0.05, plan=Plan(density=0.15, bits=4, rounds=2))
    path = tmp_path / "small.lac"
    nbytes = small.save(path)
    report = small.report()
    assert nbytes == path.stat().st_size == report.file_nbytes
    assert report.reduction_factor > 20
    assert abs(report.density - 0.15) < 0.01
    assert sum(row.nbytes for row in report.rows) < nbytes
    model = get("digits-mlp").build(seed=5)
    loaded = laconic.load_shrunk(path, into=model, sparse="never")
    x = torch.randn(7, 64)
    assert torch.equal(loaded(x), small.model(x))
    assert error_of(task)(loaded) < error_of(task)(task.model) + 0.05
    torch.save(task.model.state_dict(), tmp_path / "dense.pt")
    assert nbytes < (tmp_path / "dense.pt").stat().st_size / 20
    sparse = laconic.load_shrunk(path, into=get("digits-mlp").build(seed=6), sparse="always")
    torch.testing.assert_close(sparse(x), small.model(x))
    assert any(isinstance(module, sparse_layers.SparseChain) for module in sparse.modules())


def test_without_training_values_are_shared_and_coded(task: Task) -> None:
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    small = laconic.shrink(task.model, evaluate=error_of(task), budget=0.01)
    assert small.error is not None
    assert small.dense_error is not None
    assert small.error <= small.dense_error + 0.01
    assert small.report().reduction_factor > 6
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())


def test_search_is_resumed(task: Task, tmp_path: Path) -> None:
    """A second search trains nothing, and gives the same file; its candidates can be inspected."""
    lines, shares = [], []

    def say(line: str, share: float) -> None:
        lines.append(line)
        shares.append(share)

    def run() -> laconic.shrinking.Shrunk:  # type: ignore[name-defined]
        given = (TaskTraining(task, 1), error_of(task), 0.03)
        return laconic.shrink(task.model, *given, plan=Plan(rounds=1), folder=tmp_path, progress=say)

    small = run()
    first = lines.count("retrained")
    assert first > 0
    assert small.report().density < 0.6
    assert small.error <= small.dense_error + 0.03
    assert shares == sorted(shares)
    assert shares[-1] > 0.6
    assert file.dumps(run().parts) == file.dumps(small.parts)
    assert lines.count("retrained") == first
    kept = [file.Reader(path) for path in tmp_path.glob("shared-*.lac")]
    assert small.error in [reader.about["error"] for reader in kept]


@pytest.mark.parametrize("other", ["train", "evaluate"])
def test_another_dataset_is_another_search(other: str, task: Task, tmp_path: Path) -> None:
    """Nothing of a search with another trainer or judge is taken over, even where the dense error is the same."""
    calls: list[str] = []

    def train_on(data: torch.Tensor) -> Callable[[nn.Module], None]:
        def train(model: nn.Module) -> None:
            calls.append(f"train on {float(data)}")

        return train

    def judge_on(data: torch.Tensor) -> Callable[[nn.Module], float]:
        def judge(model: nn.Module) -> float:
            calls.append(f"judge on {float(data)}")
            return 0.5

        return judge

    one, two = torch.tensor(1.0), torch.tensor(2.0)
    plan = Plan(density=0.5, rounds=1, bits=4)
    laconic.shrink(task.model, train_on(one), judge_on(one), 0.1, plan=plan, folder=tmp_path)
    calls.clear()
    given = (train_on(two), judge_on(one)) if other == "train" else (train_on(one), judge_on(two))
    laconic.shrink(task.model, *given, 0.1, plan=plan, folder=tmp_path)
    assert [call for call in calls if call.startswith("train")]


def test_an_interrupted_search_goes_on(task: Task, tmp_path: Path) -> None:
    trained = []

    def say(line: str, share: float) -> None:
        trained.extend([line] if line == "retrained" else [])
        if len(trained) == 3:
            trained.append("interrupted")
            raise KeyboardInterrupt

    def run() -> None:
        given = (TaskTraining(task, 1), error_of(task), 0.03)
        laconic.shrink(task.model, *given, plan=Plan(rounds=1, bits=4), folder=tmp_path, progress=say)

    with pytest.raises(KeyboardInterrupt):
        run()
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert sum(path.name.startswith("pruned") for path in kept) == 2
    run()
    assert all(path.read_bytes() == data for path, data in kept.items())


def test_bits_are_added_until_the_budget_is_met() -> None:
    """Alone, each weight passes with 2 bits; together they need more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False))
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}

    def error(each: nn.Module) -> float:
        changed = [float((p.detach() - exact[name]).norm() / exact[name].norm()) for name, p in each.named_parameters()]
        return sum(changed) if min(changed) > 0 else 0.0

    small = laconic.shrink(model, evaluate=error, budget=0.35)
    assert set(small.plan.bits.values()) <= {3, 4}
    assert 0 < small.error <= 0.35


def test_a_budget_that_nothing_meets(task: Task) -> None:
    with pytest.raises(BudgetMissed) as missed:
        laconic.shrink(task.model, evaluate=error_of(task), plan=Plan(density=0.01, bits=1))
    assert missed.value.nearest.error > missed.value.nearest.dense_error  # type: ignore[attr-defined]


def test_an_error_that_is_no_number_is_within_no_budget() -> None:
    errors = iter([0.1])
    with pytest.raises(BudgetMissed):
        laconic.shrink(nn.Linear(4, 4), None, lambda model: next(errors, float("nan")), 1.0, plan=Plan(bits=3))
    with pytest.raises(BadInput, match="as it is given is inf"):
        laconic.shrink(nn.Linear(4, 4), None, lambda model: float("nan"))
    with pytest.raises(BadInput, match="budget"):
        laconic.shrink(nn.Linear(4, 4), None, lambda model: 0.1, float("nan"))


def test_judging_does_not_change_the_model() -> None:
    """Its norms would follow what they see, and dropout would make the error one of chance."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train(), torch.randn(8, 4)
    before = deepcopy(model.state_dict())
    laconic.shrink(model, None, lambda model: float(model(x).detach().abs().mean()), 9.0, plan=Plan(bits=4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_an_accuracy_is_no_error() -> None:
    model, x = nn.Linear(64, 4), torch.randn(50, 64)
    wanted = model(x).argmax(1)

    def accuracy(model: nn.Module) -> float:
        return float((model(x).argmax(1) == wanted).float().mean())

    with pytest.raises(BadInput, match=r"it fell from 1 to .* is it an accuracy"):
        laconic.shrink(model, lambda model: None, accuracy, 0.1)
    assert laconic.shrink(model, lambda model: None, lambda model: 1 - accuracy(model), 0.1).error <= 0.1  # type: ignore[operator]
    assert laconic.shrink(model, lambda model: None, lambda model: -accuracy(model), 0.1).error <= -0.9  # type: ignore[operator]


def test_a_report_counts_the_weights_that_are_kept() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10))
    some = laconic.shrink(model, plan=Plan(density={"0.weight": 0.1}, bits=3), evaluate=lambda model: 0.25, budget=1.0)
    assert some.report().density == pytest.approx((60 + 300) / 900)
    assert str(some).endswith("error 0.25, dense 0.25")
    exact = laconic.shrink(model, plan=Plan(density=0.1, share="none"))
    assert exact.report().density == pytest.approx(0.1, abs=0.002)
    assert "error" not in str(exact)


def test_what_a_search_has_judged_is_not_trained_again() -> None:
    """Also without a folder: densities are found by trying, here the same ones by every tolerance."""
    trained: list[int] = []
    laconic.shrink(nn.Linear(8, 4), lambda model: trained.append(1), lambda model: 0.1, plan=Plan(rounds=1))
    assert len(trained) == 2  # pruned weights, then shared values


def test_a_model_that_does_not_fit_is_told_how(tmp_path: Path) -> None:
    laconic.shrink(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))).save(tmp_path / "a.lac")
    with pytest.raises(BadInput, match=r"0\.weight is \(3, 4\) in the file and \(3, 5\).*only in the file: 1\.bias"):
        laconic.load_shrunk(tmp_path / "a.lac", into=nn.Sequential(nn.Linear(5, 3)))
    with pytest.raises(BadInput, match="got dict"):
        laconic.load_shrunk(tmp_path / "a.lac", into={})  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="batch"):
        laconic.load_shrunk(tmp_path / "a.lac", into=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), batch=-1)


def test_norms_and_convolutions_ship(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False))
    model(torch.randn(16, 3, 8, 8))
    model.eval()
    small = laconic.shrink(model, plan=Plan(bits=8))
    small.save(tmp_path / "a.lac")
    loaded = laconic.load_shrunk(tmp_path / "a.lac", into=deepcopy(model))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded(x), small.model(x))
    torch.testing.assert_close(loaded(x), model(x), rtol=0.05, atol=0.05)
    assert int(loaded[1].num_batches_tracked) == 1


def test_a_parameter_without_dimensions_ships(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.5))
    small = laconic.shrink(model)
    small.save(tmp_path / "a.lac")
    assert torch.equal(laconic.load_shrunk(tmp_path / "a.lac")["scale"], small.model.state_dict()["scale"])
    assert float(small.model.state_dict()["scale"]) == pytest.approx(1.5)


def test_any_state_dict_without_loss(tmp_path: Path) -> None:
    state = {"a": torch.randn(400, 300), "b": torch.arange(5), "c": torch.randn(70).half()}
    nbytes = file.write(tmp_path / "a.lac", laconic.shrinking.encode_exactly(state))  # type: ignore[attr-defined]
    assert nbytes < 0.87 * 480_000
    assert all(torch.equal(value, state[name]) for name, value in laconic.load_shrunk(tmp_path / "a.lac").items())


# Run.
def test_chains_stay_transposed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10), nn.Softmax(-1)).eval()
    masks = prune.magnitude(prune.weights(model), 0.2)
    for name, weight in prune.weights(model).items():
        weight.data.mul_(masks[name])
    x = torch.randn(5, 4, 5)
    wanted = model(x)
    assert sparse_layers.make_sparse(model, set(masks), measured=False) == ["1", "3"]
    assert isinstance(model[1], sparse_layers.SparseChain)
    torch.testing.assert_close(model(x), wanted)
    torch.testing.assert_close(model(x[:1]), wanted[:1])
    torch.testing.assert_close(deepcopy(model)(x), wanted)
    assert model(x[:0]).shape == wanted[:0].shape


class _Residual(nn.Sequential):
    """Its `forward` needs what is between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self[0](x)
        return hidden + self[2](self[1](hidden))  # type: ignore[no-any-return]


def test_a_sequence_with_a_way_of_its_own_is_no_chain() -> None:
    torch.manual_seed(0)
    model, x = _Residual(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20)), torch.randn(3, 20)
    for layer in (model[0], model[2]):
        layer.weight.data.mul_(torch.rand_like(layer.weight) < 0.2)
    wanted = model(x)
    assert sparse_layers.make_sparse(model, set(prune.weights(model)), measured=False) == ["0", "2"]
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_keeps_its_dtype(dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    """There are no sparse products of half precision, nor is one of float64 measured."""
    build = lambda: nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))  # noqa: E731
    small = laconic.shrink(build(), plan=Plan(density=0.1, bits=3))
    small.save(tmp_path / "a.lac")
    x = torch.randn(3, 20)
    for sparse in ("never", "auto", "always"):
        loaded = laconic.load_shrunk(tmp_path / "a.lac", into=build().to(device, dtype), sparse=sparse)
        torch.testing.assert_close(loaded(x.to(dtype)), small.model(x).to(dtype), rtol=0.05, atol=0.05)


def test_a_model_without_memory_is_filled(tmp_path: Path) -> None:
    """Made on "meta", its sparse layers never become dense; the outputs are those of the dense model."""
    torch.manual_seed(0)
    build = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 60), nn.ReLU(),  # noqa: E731
                                  nn.Linear(60, 5))  # fmt: skip
    small = laconic.shrink(build(), plan=Plan(density=0.1, bits=3))
    small.save(tmp_path / "a.lac")
    x = torch.randn(3, 1, 8, 8)
    for sparse in ("never", "auto", "always"):
        with torch.device("meta"):
            empty = build()
        loaded = laconic.load_shrunk(tmp_path / "a.lac", into=empty, sparse=sparse).eval()
        assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
        torch.testing.assert_close(loaded(x), small.model(x))
    assert isinstance(loaded[3], sparse_layers.SparseChain)
    assert loaded[3].steps[0].weight.col_indices().dtype == torch.int32


def test_torchs_own_layers_are_left_alone(tmp_path: Path) -> None:
    """Attention and its like reach for the weights of their parts."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    names = set(prune.weights(model))
    assert sparse_layers.make_sparse(model, names, measured=False) == []
    assert factorise(model, 0.1) == []
    assert model(torch.randn(2, 3, 16)).shape == (2, 3, 16)
    laconic.shrink(model, plan=Plan(density=0.1, bits=3)).save(tmp_path / "a.lac")
    with torch.device("meta"):
        empty = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    loaded = laconic.load_shrunk(tmp_path / "a.lac", into=empty, sparse="always")
    assert not any(tensor.is_meta for tensor in loaded.parameters())


def test_a_layer_that_is_no_quicker_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own measurement."""
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10))
    for layer in (model[0], model[2]):
        layer.weight.data.mul_(torch.rand_like(layer.weight) < 0.1)
    x = torch.randn(4, 30)
    wanted = model(x)
    monkeypatch.setattr(sparse_layers, "_is_quicker", lambda weight, batch: len(weight) == 20)
    assert sparse_layers.make_sparse(model, set(prune.weights(model)), batch=4) == ["0"]
    assert type(model[2]) is nn.Linear
    torch.testing.assert_close(model(x), wanted)


def test_low_rank_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 64))
    with torch.no_grad():
        model[0].weight.copy_(torch.einsum("or,rikl->oikl", torch.randn(32, 3), torch.randn(3, 16, 3, 3)))
        model[3].weight.copy_(torch.randn(64, 4) @ torch.randn(4, 512))
    x = torch.randn(2, 16, 4, 4)
    wanted = model(x)
    found = factorise(model, 0.999999)
    assert [each.name for each in found] == ["0", "3"]
    assert found[1].ranks == (4,)
    assert all(each.after < each.before and each.error < 1e-2 for each in found)
    torch.testing.assert_close(model(x), wanted, rtol=1e-2, atol=1e-1)
    with pytest.raises(BadInput, match="energy"):
        factorise(model, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_low_rank_layers_keep_their_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 32), nn.Linear(32, 0)).to(dtype)
    assert [each.name for each in factorise(model, 0.1)] == ["0", "2"]
    assert model(torch.randn(2, 16, 3, 3, dtype=dtype)).shape == (2, 0)
    assert {p.dtype for p in model.parameters()} == {dtype}
    layer = nn.Linear(32, 32, dtype=dtype)
    assert factorise(nn.Sequential(layer, nn.ReLU(), layer), 0.1) == []
    nn.init.constant_(model[2][0].weight, float("nan"))
    with pytest.raises(BadInput, match="NaN"):
        factorise(model)
