"""Networks: published parameter counts, shapes, and the layers of our own against slow, obvious versions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from laconic.errors import BadInput, UnknownName
from laconic.workloads import models
from laconic.workloads.models.cifar import LocallyConnected2d, ResponseNorm

COUNTS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "googlenet": 6_624_904,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "densenet121": 7_978_856,
    "lenet": 431_080,
    "mlp": 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10,
    "cifar-resnet(20)": 269_722,
    "cifar-resnet(56)": 853_018,
    "cifar-resnet(110)": 1_727_962,
    "char-gpt": 4 * 12 * 256**2 + 65 * 256 + 64 * 256 + 9 * 256,
    "char-gpt(tied=false)": 4 * 12 * 256**2 + 2 * 65 * 256 + 64 * 256 + 9 * 256,
    "logistic": 47_237,
    "linear": 1_001,
}


@pytest.mark.parametrize("spec", COUNTS)
def test_parameters_as_published(spec: str) -> None:
    with torch.device("meta"):
        assert models.parameter_count(models.build(spec)) == COUNTS[spec]


@pytest.mark.parametrize("name", models.names())
def test_every_network_says_what_it_is(name: str) -> None:
    entry = models.describe(name)
    assert entry.summary
    with torch.device("meta"):
        model = models.build(name)
        if entry.published is not None:
            assert models.parameter_count(model) == entry.published
        for figure in (word.rstrip(".,:") for word in entry.summary.split() if word.count(",") in (1, 2)):
            if figure.replace(",", "").isdigit() and int(figure.replace(",", "")) > 9999:
                assert int(figure.replace(",", "")) == models.parameter_count(model), f"{name} says {figure}"


@pytest.mark.parametrize("name", [name for name in models.names() if models.describe(name).sample])
def test_every_network_takes_its_sample(name: str) -> None:
    entry = models.describe(name)
    with torch.device("meta"):
        dtype = torch.int64 if entry.vocabulary else torch.float32
        output = models.build(name)(torch.empty(2, *entry.sample, dtype=dtype))
    assert output.shape[0] == 2
    assert output.shape[1:] in {(), (10,), (1000,), (64, 65)}


def test_a_depth_is_6n_plus_2_and_adds_layers() -> None:
    with torch.device("meta"):
        convolutions = [m for m in models.build("cifar-resnet(20)").modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) + 1 == 20  # and the fully connected layer
    with pytest.raises(BadInput, match="6n"):
        models.build("cifar-resnet(21)")


@pytest.mark.parametrize(
    "spec", ["vgg61", "vgg16(", "vgg16(x)", "vgg16(1, 2)", "vgg16(speed=2)", "vgg16(**{})", "mlp((3,))", "", "a b"]
)
def test_specs_that_name_nothing(spec: str) -> None:
    with pytest.raises(BadInput):
        models.build(spec)


def test_an_unknown_network_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownName, match="vgg16"):
        models.build("vgg61")


def test_mlp_drops_out_only_in_training() -> None:
    torch.manual_seed(0)
    model = models.build("mlp((4, 8, 8, 2), dropout=(0.2, 0.3, 0.3))")
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert rates == [0.2, 0.3, 0.3]
    x = torch.randn(6, 4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_locally_connected_is_a_convolution_with_a_filter_per_pixel() -> None:
    torch.manual_seed(0)
    layer = LocallyConnected2d(2, 3, size=4, kernel=3)
    layer.bias.data.normal_()
    x = torch.randn(5, 2, 4, 4, requires_grad=True)
    y = layer(x)
    padded = functional.pad(x, (1, 1, 1, 1))
    for row in range(4):
        for column in range(4):
            pixel = 4 * row + column
            patch = padded[:, :, row : row + 3, column : column + 3].permute(0, 2, 3, 1).reshape(5, -1)
            expected = patch @ layer.weight[pixel] + layer.bias[pixel]
            torch.testing.assert_close(y[:, :, row, column], expected)


def test_locally_connected_with_equal_filters_is_a_convolution() -> None:
    torch.manual_seed(0)
    layer, shared = LocallyConnected2d(2, 3, size=5, kernel=3), torch.randn(3, 2, 3, 3)
    layer.weight.data.copy_(shared.permute(2, 3, 1, 0).reshape(1, 18, 3).expand(25, -1, -1))
    x = torch.randn(4, 2, 5, 5, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    y, expected = layer(x), functional.conv2d(z, shared, padding=1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-4, atol=1e-4)


def test_response_norm_is_torchs() -> None:
    torch.manual_seed(0)
    x = 30 * torch.randn(3, 64, 4, 4, requires_grad=True)
    x.retain_grad()
    y = ResponseNorm(64)(x)
    expected = functional.local_response_norm(x, 9, alpha=0.001, beta=0.75, k=1.0)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_sparse_logistic_is_a_product_with_the_dense_rows() -> None:
    from laconic.workloads.data import SparseRows
    from laconic.workloads.models.small import SparseLogistic

    torch.manual_seed(0)
    dense = torch.randn(6, 20) * (torch.rand(6, 20) < 0.2)
    dense[2] = 0  # an empty document
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (dense != 0).sum(1).cumsum(0)])
    rows = SparseRows(starts, dense.nonzero()[:, 1], dense[dense != 0], 20)
    model = SparseLogistic(20)
    model.weight.data.normal_()
    numbers = torch.tensor([3, 2, 0, 3])
    output = model(rows[numbers])
    torch.testing.assert_close(output, (dense[numbers] @ model.weight).squeeze(1) + model.bias)
    output.sum().backward()
    torch.testing.assert_close(model.weight.grad, dense[numbers].sum(0).unsqueeze(1))


def test_a_gpt_sees_nothing_of_what_follows_and_takes_shorter_windows() -> None:
    torch.manual_seed(0)
    model = models.build("char-gpt(length=12, layers=2, width=16, heads=4)")
    tokens = torch.randint(65, (3, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 65
    with torch.no_grad():
        before, after, shorter = model(tokens), model(changed), model(tokens[:, :7])
    torch.testing.assert_close(before[:, :7], after[:, :7])
    torch.testing.assert_close(before[:, :7], shorter)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_attention_is_the_formula() -> None:
    """softmax(q kᵀ / √d, of what is not later) v, for each head."""
    from laconic.workloads.models.gpt import GptBlock

    torch.manual_seed(0)
    block, x = GptBlock(width=8, heads=2), torch.randn(3, 5, 8)
    with torch.no_grad():
        normed = functional.layer_norm(x, (8,), block.attention_norm.weight)
        query, key, value = (normed @ part.T for part in block.attention.weight.split(8))
        heads = []
        for columns in (slice(0, 4), slice(4, 8)):
            scores = query[..., columns] @ key[..., columns].transpose(1, 2) / 2
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(2) @ value[..., columns])
        y = x + torch.cat(heads, 2) @ block.projection.weight.T
        inner = functional.gelu(functional.layer_norm(y, (8,), block.mlp_norm.weight) @ block.widen.weight.T)
        torch.testing.assert_close(block(x), y + inner @ block.narrow.weight.T)


def test_a_tied_embedding_is_the_last_layers_weight() -> None:
    tied, untied = (models.build(f"char-gpt(layers=1, width=16, tied={choice})") for choice in ("true", "false"))
    assert tied.head.weight is tied.characters.weight
    assert untied.head.weight is not untied.characters.weight


@pytest.mark.parametrize("spec", ["char-gpt(width=30)", "char-gpt(layers=0)", "char-gpt(heads=1.5)"])
def test_a_gpt_that_cannot_be(spec: str) -> None:
    with pytest.raises(BadInput, match=r"heads|1 or more"):
        models.build(spec)
