"""Counts against published figures, hand counts and an independent count."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from laconic.cli import main
from laconic.errors import BadInput, UnknownName
from laconic.operators.method import build as build_method
from laconic.operators.shape import Convolution
from laconic.planner.cost import cost, sum_of_outputs
from laconic.planner.formulas import amplification, methods
from laconic.planner.subject import subject
from laconic.planner.trace import step
from tests.reference import layer_counts

EXACT = {
    "vgg16": layer_counts.vgg((2, 2, 3, 3, 3)),
    "vgg19": layer_counts.vgg((2, 2, 4, 4, 4)),
    "resnet18": layer_counts.resnet((2, 2, 2, 2), False),
    "resnet50": layer_counts.resnet((3, 4, 6, 3), True),
    "densenet121": layer_counts.densenet121(),
    "cifar-resnet(110)": layer_counts.cifar_resnet(110),
    "alexnet": layer_counts.alexnet(),
    "lenet": layer_counts.lenet(),
    "googlenet": layer_counts.googlenet(),
}
PUBLISHED = {  # parameters, as papers and reference implementations print them
    "lenet": 431_080, "alexnet": 61_100_840, "vgg16": 138_357_544, "vgg19": 143_667_240, "googlenet": 6_624_904,
    "resnet18": 11_689_512, "resnet50": 25_557_032, "cifar-resnet(110)": 1_727_962, "densenet121": 7_978_856,
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_counts_of_published_networks(name: str) -> None:
    found = cost(name, batch=2)
    assert found.total("parameters") == PUBLISHED[name]
    assert (found.total("parameters"), found.total("multiply_adds")) == (EXACT[name][0], 2 * EXACT[name][1])
    assert found.total("weight_nbytes") == 4 * EXACT[name][0] == found.total("gradient_nbytes")
    assert found.total("backward_multiply_adds") == found.backward_multiply_adds


class Sequence(nn.Module):
    """A recurrent layer or attention, whose output is the first of several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        several = (x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else (x,)
        return self.inner(*several)[0]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_layers(kind: str, train: bool) -> None:
    layer = (nn.LSTM if kind == "lstm" else nn.GRU)(8, 16, 2, batch_first=True)
    found = cost(Sequence(layer), batch=3, sample=(5, 8), train=train)
    expected = layer_counts.lstm(3, 5, 8, 16, 2, gates=4 if kind == "lstm" else 3)
    assert (found.total("parameters"), found.total("multiply_adds")) == expected
    assert found.depth >= 5 * 4  # the state goes from step to step


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(train: bool, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=batch_first)
    found = cost(Sequence(layer), batch=3, sample=(3, 32) if not batch_first else (7, 32), train=train)
    expected = layer_counts.attention(3, 7, 32, 4) if batch_first else layer_counts.attention(3, 3, 32, 4)
    assert (found.total("parameters"), found.total("multiply_adds")) == expected


@settings(max_examples=25)
@given(
    batch=st.integers(1, 3), inputs=st.integers(1, 4), outputs=st.integers(1, 4), groups=st.sampled_from([1, 2, 4]),
    size=st.integers(5, 12), kernel=st.integers(1, 3), stride=st.integers(1, 3), padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
)  # fmt: skip
def test_convolutions_by_an_independent_count(
    batch: int, inputs: int, outputs: int, groups: int, size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    a, b = inputs * groups, outputs * groups
    layer = nn.Conv2d(a, b, kernel, stride, padding, dilation, groups)
    parameters, work, place = layer_counts.convolution(batch, a, b, size, kernel, stride, padding, dilation, groups)
    (found,) = cost(layer, batch=batch, sample=(a, size, size)).layers
    assert (found.parameters, found.multiply_adds, found.work) == (parameters, work, work)
    assert found.output_nbytes == 4 * batch * b * place * place
    assert found.backward_multiply_adds == work  # of the weights; nobody wants the gradient of the images


class Twice(nn.Module):
    """A layer that runs twice, and one whose weight is the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.first(self.first(x)))


def test_what_is_used_again_has_its_weights_once_and_its_work_each_time() -> None:
    found = cost(Twice(), batch=5, sample=(6,))
    assert found.total("parameters") == 36
    assert found.total("multiply_adds") == 3 * 5 * 36
    assert [layer.calls for layer in found.layers] == [2, 1]
    assert found.total("output_nbytes") == 3 * 5 * 6 * 4


@pytest.mark.parametrize("spec", ["char-gpt(65, 16, 2, 32, 2)", "digits-cnn", "cifar-resnet(8)", "mlp"])
def test_memory_on_shapes_alone_is_that_of_a_real_step(spec: str) -> None:
    sample = (16,) if spec.startswith("char") else None
    found = cost(spec, batch=3, sample=sample, optimizer="adam")
    assert not found.notes  # nothing was run for real
    chosen = subject(spec, sample, None, "adam")
    model = chosen.model("cpu")
    traced = step(model, (chosen.inputs(3, "cpu"),), sum_of_outputs, chosen.optimizer)
    assert found.saved_nbytes == traced.saved_nbytes
    assert found.training_nbytes == pytest.approx(traced.peak_nbytes, rel=0.02)


class Sparse(nn.Module):
    """A product with a sparse matrix, of which torch's own counter says 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(6).to_sparse())
        self.dense = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.graph, self.dense(x))


def test_sparse_products_count_what_is_stored() -> None:
    assert cost(Sparse(), batch=6, sample=(4,)).total("multiply_adds") == 6 * 4 * 4 + 6 * 4


@settings(max_examples=25)
@given(
    batch=st.integers(1, 4), inputs=st.integers(1, 96), outputs=st.integers(1, 96), size=st.integers(4, 64),
    kernel=st.sampled_from([3, 5]),
)  # fmt: skip
def test_work_and_depth_are_those_of_the_operators(
    batch: int, inputs: int, outputs: int, size: int, kernel: int
) -> None:
    conv = Convolution(batch, inputs, outputs, (size, size), (kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1))
    found = methods(conv)
    for name in ("direct", "im2col"):
        said = build_method(name).cost(conv)
        assert found[name] == (said.multiplications, max(1, said.depth))
    said = build_method("winograd(2)").cost(conv)
    assert found["winograd"][0] > said.multiplications  # which leaves the transforms out
    assert found["winograd"][1] == said.depth
    padded = 2 * math.ceil(math.log2((size + 3 * kernel) ** 2)) + 1  # the operator's transforms are of padded images
    assert found["fft"][1] <= build_method("fft").cost(conv).depth <= padded + math.ceil(math.log2(inputs)) + 1


def test_methods_of_a_convolution() -> None:
    conv = Convolution(1, 64, 64, (56, 56), (3, 3), (1, 1), (1, 1), (1, 1))
    found = methods(conv)
    assert found["direct"] == (64 * 64 * 56 * 56 * 9, 6 + 2 + 2)
    assert found["direct"][0] / (16 * 64 * 64 * 28 * 28) == 2.25  # products that F(2×2, 3×3) spares
    assert found["winograd"][0] < found["direct"][0]
    assert amplification(conv) == 9.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "unknown model 'nothing'"),
        (["vgg16", "--input-shape", "3,x"], "an input shape is whole numbers with commas"),
        (["lenet", "--input-shape", "1,5,5"], "cannot be run on an input of shape 1×1×5×5"),
        (["logistic"], "--input-shape"),
        (["lenet", "--batch", "0"], "--batch must be at least 1"),
        (["lenet", "--optimizer", "adan"], "did you mean 'adam'"),
        (["no_such_module:model"], "cannot be imported"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cost", *arguments])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cost", "lenet", "--json"])
    assert not ended.value.code
    record = json.loads(capsys.readouterr().out)
    assert record["total"]["multiply_adds"] == 2_293_000
    assert {"name", "kind", "parameters", "weight_nbytes", "output_nbytes", "gradient_nbytes", "multiply_adds", "work",
            "depth"} <= record["layers"][0].keys()  # fmt: skip
    with pytest.raises(SystemExit):
        main(["cost", "vgg16", "--methods"])
    assert "winograd" in capsys.readouterr().out


def test_unknown_names() -> None:
    with pytest.raises(UnknownName):
        cost("vgg61")
    with pytest.raises(BadInput):
        cost(nn.Linear(3, 3))
