"""`tune` replaces what gains and nothing else, keeps what a model is, and forgets nothing when weights change.

Which method is quickest depends on the machine's mood, so most tests choose by decree (`decreed`) instead of by time.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from laconic.errors import BadInput, UnknownName
from laconic.operators import build, plan_of, tune, untune
from laconic.operators import search as search_module
from laconic.operators.model_error import gradient_noise
from laconic.operators.plan import OperatorRow
from laconic.operators.search import MethodChoice
from laconic.storage import tree
from laconic.workloads import models

TUNE = "laconic.operators.tuning"
NETWORKS = ["digits-cnn", "lenet", "cuda-convnet", "cifar-resnet(8)"]
LARGE = ["alexnet", "vgg16", "vgg19", "googlenet", "resnet18", "resnet50", "densenet121"]


@pytest.fixture
def decreed(monkeypatch):
    """Choose the first of some methods that takes the convolution; counts how often it is asked."""
    asked = []

    def choose(conv, x, weight, bias, limits, needs_input_gradient):
        asked.append(conv)
        found = []
        for role in search_module.ROLES if limits.train else ("forward",):
            if role == "input gradient" and not needs_input_gradient:
                continue
            target = conv.adjoint() if role == "input gradient" else conv
            wish = ("winograd(4)", "winograd(2)", "im2col")
            spec = "native" if target is None else next(s for s in wish if not build(s).refuses(target))
            pieces = (conv.batch,) if conv.batch == 1 or spec == "native" else (conv.batch - 1, 1)
            found.append(MethodChoice(role, spec, pieces, 2.0, 1.0, 2.0, 1.5, 1e-7, 0))
        return found

    monkeypatch.setattr(f"{TUNE}.choose", choose)
    monkeypatch.setattr(f"{TUNE}._whole_speedup", lambda *_: 2.0)
    return asked


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 4, 1))


X = torch.linspace(-1, 1, 2 * 3 * 12 * 12).view(2, 3, 12, 12).sin()


def test_parameters_keys_and_results_stay(decreed):
    model = small()
    before, keys, wanted = list(model.parameters()), list(model.state_dict()), model(X)
    tuned = tune(model, X, cache=None)
    assert tuned is model
    assert len(decreed) == 3
    assert [id(p) for p in tuned.parameters()] == [id(p) for p in before]
    assert list(tuned.state_dict()) == keys
    assert type(tuned[0]).__name__ == "TunedConv2d"
    assert isinstance(tuned[0], nn.Conv2d)
    with torch.no_grad():
        assert torch.allclose(tuned(X), wanted, atol=1e-5)
        assert not torch.equal(tuned(X), wanted), "another method rounds otherwise: was it used at all?"
    assert torch.equal(tuned(X), wanted), "without train=True, what autograd records is torch's own"
    assert [row.layer for row in plan_of(tuned).rows] == ["0", "2", "3"]
    assert "winograd(4)" in str(plan_of(tuned))
    assert "1 + 1" in str(plan_of(tuned)) or "2×1" in str(plan_of(tuned))
    restored = untune(tuned)
    assert [type(m) for m in restored] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Conv2d]
    assert torch.equal(restored(X), wanted)
    assert not hasattr(restored, "plan")


def test_other_shapes_run_as_before(decreed):
    model = small()
    other = torch.randn(3, 3, 9, 10)
    wanted = model(other)
    with torch.no_grad():
        assert torch.equal(tune(model, X, cache=None)(other), wanted)
        assert torch.equal(model(other.double().float()), wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].weight.mul_(-1),
        lambda m: m[0].weight.data.mul_(-1),
        lambda m: m.load_state_dict({k: -v for k, v in m.state_dict().items()}),
        lambda m: setattr(m[0], "weight", nn.Parameter(-m[0].weight)),
    ],
    ids=["in place", "through .data", "load_state_dict", "another parameter"],
)
def test_changed_weights_are_prepared_anew(decreed, change):
    model = tune(small(), X, cache=None)
    with torch.no_grad():
        model(X)
        change(model)
        found = model(X)
        assert torch.allclose(found, untune(model)(X), atol=1e-5)


def test_what_is_hooked_or_subclassed_is_left_alone(decreed):
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), Mine(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding_mode="circular")
    )
    model[0].register_forward_hook(lambda *_: None)
    tuned = tune(model, X, cache=None)
    assert [type(m).__name__ for m in tuned] == ["Conv2d", "Mine", "TunedConv2d", "Conv2d"]
    reasons = [row.left_alone for row in plan_of(tuned).rows]
    assert "hooks" in reasons[0]
    assert "Mine" in reasons[1]
    assert "circular" in reasons[3]
    assert all(reason in str(plan_of(tuned)) for reason in reasons)


def test_shared_layers_stay_shared_and_a_lone_layer_is_tuned(decreed):
    shared = nn.Conv2d(3, 3, 3, padding=1)
    tuned = tune(nn.Sequential(shared, nn.ReLU(), shared), X, cache=None)
    assert tuned[0] is tuned[2]
    lone = tune(nn.Conv2d(3, 4, 3), X, cache=None)
    assert type(lone).__name__ == "TunedConv2d"
    assert type(untune(lone)) is nn.Conv2d


def test_copies_and_pickles_compute_the_same(decreed):
    model = tune(small(), X, cache=None)
    with torch.no_grad():
        wanted = model(X)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(X), wanted)
            twin[0].weight.zero_()
            assert torch.equal(model(X), wanted)


def test_a_model_keeps_its_mode_and_its_statistics(decreed):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    before = model[1].running_mean.clone()
    tune(model, X, cache=None)
    assert model.training
    assert model[0].training
    assert torch.equal(model[1].running_mean, before)


def test_the_cache_is_used_and_what_is_foreign_or_corrupt_is_measured_again(decreed, tmp_path):
    tune(small(), X, cache=tmp_path)
    assert len(decreed) == 3
    again = tune(small(), X, cache=tmp_path)
    assert len(decreed) == 3
    assert plan_of(again).from_cache
    assert type(again[0]).__name__ == "TunedConv2d"
    (here,) = tmp_path.iterdir()
    whole = {path: tree.read_file(path) for path in here.iterdir()}
    assert len(whole) == 4  # each layer, and the model

    def asked_with(change):
        decreed.clear()
        for path, kept in whole.items():
            change(path, kept)
        tune(small(), X, cache=tmp_path)
        return len(decreed)

    def spoilt(path, kept):
        if path.name.startswith("layer"):
            tree.write_file(path, {**kept, "value": [{**kept["value"][0], "method": "nosuch"}]})
        else:
            path.unlink()

    assert asked_with(tree.write_file) == 0
    assert asked_with(lambda path, kept: path.write_bytes(path.read_bytes()[:100])) == 3
    assert asked_with(lambda path, kept: tree.write_file(path, {**kept, "key": "of another machine"})) == 3
    assert asked_with(spoilt) == 3
    assert asked_with(lambda path, kept: tree.write_file(path, {**kept, "value": 7})) == 3
    # Another shape, another tolerance, another workspace: other entries.
    decreed.clear()
    tune(small(), X[:1], cache=tmp_path)
    tune(small(), X, 1e-4, cache=tmp_path)
    tune(small(), X, workspace="32MiB", cache=tmp_path)
    assert len(decreed) == 9


@pytest.mark.parametrize("name", [*NETWORKS, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_outputs_and_gradients_of_our_networks_stay_within_the_tolerance(decreed, name):
    torch.manual_seed(0)
    model = models.build(name).eval()
    x = torch.randn(2, *models.describe(name.partition("(")[0]).sample)
    tolerance = 1e-4 if name in LARGE else 1e-5
    plain = model(x)
    weights = list(model.parameters())
    wanted = torch.autograd.grad(plain.square().sum(), weights)
    tuned = tune(model, x, tolerance, train=True, cache=None)
    assert plan_of(tuned).error <= tolerance
    assert any(row.gains for row in plan_of(tuned).rows)
    found = tuned(x)
    assert float((found - plain).detach().abs().max()) <= tolerance * float(plain.detach().abs().max())
    near = 10 * tolerance
    if name in LARGE:  # the least difference moves a maximum of pooling
        near = max(near, 4 * gradient_noise(untune(tuned), (x,)))
    for a, b in zip(torch.autograd.grad(found.square().sum(), weights), wanted, strict=True):
        assert float((a - b).abs().max()) <= near * float(b.abs().max())


def test_the_first_layers_input_gradient_is_nobodys_business(decreed):
    tuned = tune(small(), X, train=True, cache=None)
    roles = {row.layer: [choice.role for choice in row.choices] for row in plan_of(tuned).rows}
    assert roles["0"] == ["forward", "weight gradient"]
    assert roles["2"] == roles["3"] == list(search_module.ROLES)


def test_what_a_minute_does_not_reach_is_measured_the_next_time(monkeypatch, decreed, tmp_path):
    monkeypatch.setattr(f"{TUNE}._SECONDS", -1.0)
    tuned = tune(small(), X, cache=tmp_path)
    assert len(decreed) == 0
    assert [row.left_alone for row in plan_of(tuned).rows] == ["not measured: the time was up"] * 3
    monkeypatch.setattr(f"{TUNE}._SECONDS", 60.0)
    assert not plan_of(tune(tuned, X, cache=tmp_path)).from_cache
    assert len(decreed) == 3
    assert plan_of(tune(tuned, X, cache=tmp_path)).from_cache


def test_the_plan_tells_what_micro_batches_gave(decreed):
    plan = plan_of(tune(small(), X, cache=None))
    assert plan.micro_batching == 1.5
    assert "micro-batches gave 1.50" in str(plan)


def test_a_layer_that_spoils_the_whole_runs_native(monkeypatch, decreed):
    monkeypatch.setattr(f"{TUNE}.model_error", lambda model, *_: (1.0 if hasattr(model[0], "routes") else 0.0, 0.0))
    tuned = tune(small(), X, cache=None)
    assert type(tuned[0]) is nn.Conv2d
    assert "whole would be off" in str(plan_of(tuned))


def test_gradients_may_be_as_far_off_as_torchs_own(monkeypatch, decreed):
    monkeypatch.setattr(f"{TUNE}.model_error", lambda *_: (0.0, 0.02))
    monkeypatch.setattr(f"{TUNE}.gradient_noise", lambda *_: 0.011)
    assert hasattr(tune(small(), X, train=True, cache=None)[0], "routes")
    monkeypatch.setattr(f"{TUNE}.gradient_noise", lambda *_: 0.009)
    assert type(tune(small(), X, train=True, cache=None)[0]) is nn.Conv2d


def test_what_slows_the_whole_is_given_up_and_what_reorders_first(monkeypatch, decreed):
    monkeypatch.setattr(f"{TUNE}._whole_speedup", lambda *_: 0.9)
    tuned = tune(small(), X, cache=None)
    assert [type(m) for m in tuned] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Conv2d]
    assert [row.left_alone for row in plan_of(tuned).rows] == ["native: the whole would be slower"] * 3
    assert plan_of(tuned).speedup is None

    def only_the_last(conv, x, weight, bias, limits, needs_input_gradient):
        spec = "prepacked(true)" if conv.groups > 1 else "im2col"
        return [MethodChoice("forward", spec, (conv.batch,), 2.0, 1.0, 2.0, 1.0, 1e-7, 0)]

    monkeypatch.setattr(f"{TUNE}.choose", only_the_last)
    monkeypatch.setattr(f"{TUNE}._whole_speedup", lambda model, *_: 0.9 if hasattr(model[2], "routes") else 1.1)
    tuned = tune(small(), X, cache=None)
    assert [hasattr(m, "routes") for m in tuned] == [True, False, False, True]
    assert "the whole: 1.10 times as fast" in str(plan_of(tuned))


def test_a_tuned_model_gets_no_attribute():
    """Its own names are its owner's; who is not tuned has no plan."""
    model = nn.Sequential(nn.Conv1d(2, 2, 33, padding=16))
    before = set(vars(model))
    tuned = tune(model, torch.randn(1, 2, 200), policy="undivided", cache=None)
    assert set(vars(tuned)) == before
    assert plan_of(tuned).rows
    with pytest.raises(BadInput, match="not tuned"):
        plan_of(untune(tuned))


def test_by_measurement():
    """The real thing, on layers so small that it takes a moment; whatever wins must be near."""
    model = nn.Sequential(nn.Conv1d(2, 2, 33, padding=16), nn.Conv1d(2, 4, 1))
    x = torch.randn(1, 2, 200)
    wanted = model(x)
    tuned = tune(model, x, policy="undivided", cache=None)
    with torch.no_grad():
        assert torch.allclose(tuned(x), wanted, atol=1e-4)
    assert plan_of(tuned).error <= 1e-5
    tune(untune(tuned), x, "native", policy="undivided", cache=None)


def test_micro_batches_of_torchs_own_can_be_the_worst_there_is():
    """Where nothing else gains any more and the whole is still off, they go, too."""
    divided = MethodChoice("forward", "native", (2, 2), 2.0, 1.0, 2.0, 2.0, 0.0, 0)
    row = OperatorRow("0", None, (divided,)).without_the_worst()
    assert (row.gains, row.left_alone) == (False, "native: the whole would be off")


def test_bad_input_is_one_sentence():
    model = small()
    with pytest.raises(BadInput, match=r"no method meets a tolerance of 1e-12: torch's own convolution is off by"):
        tune(model, X, 1e-12, cache=None)
    with pytest.raises(BadInput, match="the example does not run through the model"):
        tune(model, torch.zeros(2, 5, 12, 12), cache=None)
    with pytest.raises(BadInput, match="a workspace of 16 bytes is below the least that any method needs here"):
        tune(model[:1], X, workspace=16, cache=None)
    with pytest.raises(BadInput, match="workspace 'much' should be a number"):
        tune(model, X, workspace="much", cache=None)
    with pytest.raises(BadInput, match="tolerance is a positive number"):
        tune(model, X, -1.0, cache=None)
    with pytest.raises(UnknownName, match="micro-batching policy"):
        tune(model, X, policy="halves", cache=None)
    assert all(type(layer) in (nn.Conv2d, nn.ReLU) for layer in model), "a refusal changes nothing"


def test_the_mode_of_denormals_is_put_back() -> None:
    """Codecs and everything else on the thread keep exact small numbers."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    tune(model, torch.randn(1, 3, 12, 12), cache=None)
    model(torch.randn(1, 3, 12, 12))
    assert float(torch.tensor(1e-40) * 1.0) != 0.0


def test_a_tuned_model_is_exported_and_compiled(decreed):
    """What is exported is torch's own code; a compiled model calls the plan's methods, and is compiled once."""
    model = tune(small(), X)
    with torch.no_grad():
        expected = model(X)
        exported = torch.export.export(model, (X,)).module()
        torch.testing.assert_close(exported(X), expected, atol=1e-5, rtol=1e-5)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                assert torch.equal(compiled(X), expected)
                for parameter in model.parameters():
                    parameter.mul_(1.0)  # the next forward prepares them anew
