"""Without a codec, a pipeline's gradients are those of one process, bit for bit; with one, bytes are as predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laconic.errors import BadInput, Mismatch, PeerLost
from laconic.parallel.boundary import Boundary
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import Pipeline, build
from laconic.parallel.pipeline.tied import Tied
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from laconic.workloads.models.gpt import CharGPT
from tests.parallel.pipeline.subjects import (
    Convolutions,
    Looping,
    Skips,
    features,
    gradients,
    images,
    loss_fn,
    masked,
    mlp,
    on_threads,
    one_process,
    targets,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")
SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], list[tuple[str, ...]]]] = {
    "sequential": (mlp, features, [("1",), ("6.1",), ("1", "2", "7")]),
    "in place": (Convolutions, images, [("features.2",), ("features.1", "head.1"), ("features.3", "head", "head.2")]),
    "skips": (Skips, features, [("layers.1",), ("layers.2", "layers.4"), ("layers.0", "layers.3", "last")]),
    "looping": (Looping, masked, [("inner",), ("inner", "after")]),
}
CASES = [(name, cuts) for name, (_, _, all_cuts) in SUBJECTS.items() for cuts in all_cuts]


def _step(inputs: tuple[Tensor, ...]) -> Callable[[Pipeline, World], dict[str, Any]]:
    def work(model: Pipeline, world: World) -> dict[str, Any]:
        losses = [model.step(inputs, targets(), loss_fn) for _ in range(2)]  # gradients of two steps add up
        return {
            "gradients": gradients(model), "losses": losses, "buffers": dict(model.named_buffers()),
            "sent": model.traffic.total_nbytes, "predicted": 2 * model.predicted_nbytes(inputs),
            "peak": model.peak_in_flight, "lags": model.layout.lags,
            "keys": list(model.state_dict()),
        }  # fmt: skip

    return work


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "async"])
@pytest.mark.parametrize(("name", "cuts"), CASES)
def test_gradients_are_those_of_one_process_to_the_bit(name: str, cuts: tuple[str, ...], schedule: str) -> None:
    make, inputs, _ = SUBJECTS[name]
    model = make()
    found = on_threads(len(cuts) + 1, model, Stages(cuts, 6, schedule), _step(inputs()))
    losses = [one_process(model, inputs(), 6) for _ in range(2)]
    expected, merged = gradients(model), {k: v for rank in found for k, v in rank["gradients"].items()}
    assert merged.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(merged[key], gradient), key
    for key, buffer in model.named_buffers():
        assert any(torch.equal(rank["buffers"][key], buffer) for rank in found if key in rank["buffers"]), key
    assert [rank["losses"] for rank in found[:-1]] == [[None, None]] * (len(found) - 1)
    assert all(map(torch.equal, found[-1]["losses"], losses))
    assert sorted(key for rank in found for key in rank["keys"]) == sorted(model.state_dict())
    for rank in found:
        assert rank["sent"] == rank["predicted"]
        assert rank["peak"] <= rank["lags"][0] + 1


@given(st.data())
@settings(max_examples=25)
def test_no_size_deadlocks_or_differs(data: st.DataObject) -> None:
    stages, micro = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 32))
    places = data.draw(st.sets(st.integers(1, 8), min_size=stages - 1, max_size=stages - 1))
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "async"]))
    in_flight = data.draw(st.none() | st.integers(1, 9))
    plan = Stages(tuple(map(str, sorted(places))), micro, schedule, in_flight=in_flight)
    torch.manual_seed(0)
    model, inputs = mlp(), features(micro)

    def work(model: Pipeline, world: World) -> dict[str, Tensor]:
        model.step(inputs, targets(micro), loss_fn)
        return gradients(model)

    found = on_threads(stages, model, plan, work)
    one_process(model, inputs, micro)
    merged = {k: v for rank in found for k, v in rank.items()}
    assert all(torch.equal(merged[key], gradient) for key, gradient in gradients(model).items())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "async"])
def test_micro_batches_that_differ_by_a_sample_give_the_mean_over_samples(schedule: str) -> None:
    model, inputs = Skips(), features(11)

    def work(model: Pipeline, world: World) -> tuple[dict[str, Tensor], Tensor | None]:
        loss = model.step(inputs, targets(11), loss_fn)
        assert model.traffic.total_nbytes == model.predicted_nbytes(inputs)
        return gradients(model), loss

    found = on_threads(3, model, Stages(("layers.2", "last"), 4, schedule, uneven=True), work)
    parts = zip(inputs[0].tensor_split(4), targets(11).tensor_split(4), strict=True)
    expected = [loss_fn(model(x), y) * len(x) / 11 for x, y in parts]
    torch.stack(expected).sum().backward()
    torch.testing.assert_close(found[-1][1], torch.stack(expected).sum().detach())
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(next(rank[key] for rank, _ in found if key in rank), gradient)


@pytest.mark.parametrize("codec", ["dynamic8", ("qsgd(4)", "fp16"), "topk(0.1)"])
def test_bytes_through_a_codec_are_as_predicted(codec: Any) -> None:
    inputs = features()

    def work(model: Pipeline, world: World) -> list[int]:
        before = world.transport.counters.total_sent_nbytes
        model.step(inputs, targets(), loss_fn)
        sent = world.transport.counters.total_sent_nbytes - before
        return [sent, model.traffic.total_nbytes, model.predicted_nbytes(inputs)]

    found = on_threads(3, Skips(), Stages(("layers.2", "last"), 4), work, codec)
    for sent, counted, predicted in found:
        assert sent == counted == predicted > 0


def test_a_fine_codec_gives_nearly_the_gradient() -> None:
    model, inputs = Skips(), features()

    def work(model: Pipeline, world: World) -> dict[str, Tensor]:
        model.step(inputs, targets(), loss_fn)
        return gradients(model)

    found = on_threads(3, model, Stages(("layers.2", "last"), 4), work, "dynamic8")
    one_process(model, inputs, 4)
    for key, gradient in gradients(model).items():
        coded = next(rank[key] for rank in found if key in rank)
        assert 0 < (coded - gradient).norm() / gradient.norm() < 0.1, key


def test_tied_weights_stay_alike_and_train_as_in_one_process() -> None:
    model = CharGPT(characters=11, length=6, layers=3, width=8, heads=2, tied=True)
    tokens, answers = torch.arange(48).view(8, 6) % 11, torch.arange(1, 49).view(8, 6) % 11

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return loss_fn(logits.flatten(0, 1), target.flatten())

    def work(model: Pipeline, world: World) -> tuple[dict[str, Tensor], int, int]:
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        for _ in range(3):
            model.step(tokens, answers, loss)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), model.traffic.total_nbytes, 3 * model.predicted_nbytes(tokens)

    found = on_threads(3, model, Stages(("blocks.1", "blocks.2"), 4), work)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for _ in range(3):
        for part, answer in zip(tokens.chunk(4), answers.chunk(4), strict=True):
            (loss(model(part), answer) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(found[0][0]["characters.weight"], found[2][0]["head.weight"])
    for state, sent, predicted in found:
        assert sent == predicted + 11 * 8 * 4 * (state is found[0][0])  # the first stage's copy went to the last
        for key, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-4, atol=1e-6)


def test_evaluation_with_and_without_the_codec() -> None:
    model, inputs = Convolutions().eval(), images()

    def work(model: Pipeline, world: World) -> list[Any]:
        coded = model.eval()(*inputs)
        with model.exact():
            exact = model(*inputs)
        odd = model(inputs[0][:5])
        model.train().step(inputs, targets(), loss_fn)
        return [coded, exact, odd]

    first, last = on_threads(2, model, Stages(("head",), 4), work, "dynamic8")
    assert first == [None] * 3
    with torch.no_grad():
        expected = torch.cat([model(part) for part in inputs[0].chunk(4)])
    assert torch.equal(last[1], expected)
    assert 0 < (last[0] - expected).abs().max() < 0.1
    assert last[2].shape == (5, 5)


class Several(nn.Module):
    """Its output is of tensors and of others, as where no targets are given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.b(self.a(x))
        return {"logits": y, "loss": None, "width": y.shape[-1], "mean": y.mean()}


def test_outputs_that_are_no_tensors() -> None:
    whole, inputs = Several().eval(), features()
    expected = whole(*inputs)

    def work(model: Pipeline, world: World) -> Any:
        with pytest.raises(BadInput, match="inputs are a tensor, or several"):
            model.eval()()
        return model(*inputs)

    first, last = on_threads(2, whole, Stages(("b",), 4), work)
    assert first is None
    torch.testing.assert_close(last["logits"], expected["logits"])
    assert (last["loss"], last["width"], last["mean"].shape) == (None, 5, (4,))


def test_only_shapes_are_read_where_no_values_are_needed() -> None:
    inputs = features()

    def work(model: Pipeline, world: World) -> Any:
        given = inputs if model.stage == 0 else tuple(torch.empty_like(each, device="meta") for each in inputs)
        return model.step(given, targets() if model.stage == 1 else None, loss_fn)

    model = mlp()
    assert torch.equal(on_threads(2, model, Stages(("4",), 4), work)[1], one_process(model, inputs, 4))


def test_frozen_layers_get_no_gradient_and_send_none() -> None:
    model, inputs = mlp(), features()
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)

    def work(model: Pipeline, world: World) -> tuple[dict[str, Tensor], int]:
        model.step(inputs, targets(), loss_fn)
        return gradients(model), model.traffic.total_nbytes

    (none, sent), (found, returned) = on_threads(2, model, Stages(("4",), 3), work)
    one_process(model, inputs, 3)
    assert (none, sent, returned) == ({}, 12 * 12 * 4, 0)
    assert all(torch.equal(found[key], gradient) for key, gradient in gradients(model).items())


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Stages(("nonsense",), 4), "the cut 'nonsense' names no layer that the model calls; it calls first, layers.0"),
        (Stages(("first",), 4), "the cut 'first' begins a stage with the model's first layer and leaves none"),
        (Stages(("last", "layers.1"), 4), "2 cuts make 3 stages, and there are 2 ranks"),
    ],
)
def test_what_cannot_be_cut_so_is_said_when_it_is_divided(plan: Stages, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        on_threads(2, Skips(), plan, lambda *_: None)


def test_cuts_out_of_order_and_more_stages_than_layers() -> None:
    with pytest.raises(BadInput, match=r"cuts go in the order in which the model calls its layers, got last"):
        on_threads(3, Skips(), Stages(("last", "layers.1"), 4), lambda *_: None)
    with pytest.raises(BadInput, match="4 stages need as many layers, and the model has 3: before, inner, after"):
        on_threads(4, Looping(), Stages("auto", 4), lambda *_: None)


def test_bad_batches_are_refused_before_anything_is_sent() -> None:
    def work(model: Pipeline, world: World) -> None:
        with pytest.raises(BadInput, match="a batch of 12 samples does not make 5 equal micro-batches"):
            model.step(features(), targets(), loss_fn)
        with pytest.raises(BadInput, match=r"the model does not take a micro-batch of \(2, 7\)"):
            model.step(torch.ones(10, 7), targets(10), loss_fn)
        if model.stage == 1:
            with pytest.raises(BadInput, match="a batch of targets of 9 samples does not make 5"):
                model.step(features(10), targets(9), loss_fn)
        model.step(features(10), targets(10), loss_fn)

    on_threads(2, mlp(), Stages(("4",), 5), work)


@pytest.mark.parametrize(("micro", "schedule"), [(1, "async"), (4, "gpipe")])
def test_a_loss_that_fails_between_two_messages_is_told(micro: int, schedule: str) -> None:
    calls = []

    def fails(output: Tensor, target: Tensor) -> Tensor:
        calls.append(target)
        if len(calls) == micro:
            raise ArithmeticError("no loss today")
        return loss_fn(output, target)

    def work(model: Pipeline, world: World) -> None:
        with pytest.raises(ArithmeticError if model.stage else PeerLost):
            model.step(features(), targets(), fails)

    on_threads(2, mlp(), Stages(("4",), micro, schedule), work)


class ChangedLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x)) + x


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else x


def test_models_that_cannot_be_cut_are_refused_in_a_sentence() -> None:
    with pytest.raises(BadInput, match="is changed in place on stage 1, and stage 2 uses it after"):
        on_threads(3, ChangedLater(), Stages(("b", "c"), 4), lambda *_: None)
    with pytest.raises(BadInput, match=r"torch.fx cannot trace its forward: .*move what it cannot trace"):
        on_threads(2, Deciding(), Stages("auto", 4), lambda *_: None)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    copies = [copy.deepcopy(m) for m in [mlp()] * 2]

    def body(transport: Any) -> None:
        build(copies[transport.rank], Stages(("4",), 4 + transport.rank), Boundary.of(None), World(transport))

    with pytest.raises(Mismatch, match="divide: plan differs"):
        run_threads(2, body)


def test_an_error_leaves_the_gradients_that_were_there() -> None:
    """Of a weight that several stages use: those of earlier micro-batches that are to be accumulated."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = kept = torch.full((2,), 3.0)
    tied = Tied([(None, weight, (0, 1))])  # type: ignore[list-item]

    def lose() -> None:
        with tied.gathering():
            weight.grad = torch.zeros(2)
            raise PeerLost("stage 1 was lost", rank=0)

    with pytest.raises(PeerLost):
        lose()
    assert weight.grad is kept


def test_a_forward_that_decorators_wrap_is_said_to_be_so() -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=1, vocab_size=11, bos_token_id=0, eos_token_id=0)
    with pytest.raises(BadInput, match=r"decorators wrap it, .*; call its layers from a plain forward of your own"):
        on_threads(2, transformers.GPT2LMHeadModel(small), Stages("auto", 2), lambda *_: None)
