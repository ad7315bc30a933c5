"""The laws every convolution method keeps: equal to the slow twin within its stated bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic import operators
from laconic.errors import BadInput, UnknownName
from laconic.operators import Convolution, convolve
from laconic.operators.scratch import fresh
from operators.subjects import METHODS, allowed, convolutions, expected, fitted, operands, options
from reference import convolution as reference

every_method = pytest.mark.parametrize("spec", METHODS)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=15)
USUAL = Convolution(2, 6, 8, (13, 15), (3, 3), (1, 1), (1, 1), (1, 1), 2)


@every_method
def test_a_method_takes_its_typical_convolution(spec):
    conv = fitted(USUAL, spec)
    assert not operators.build(spec).refuses(conv)  # no method passes by refusing everything
    assert str(operators.build(spec).name) in spec
    x, w, b = operands(conv, 0)
    y = operators.convolve(x, w, b, spec, **options(conv)).double()
    wanted = torch.convolution(x.double(), w.double(), b.double(), conv.stride, conv.padding, conv.dilation, False,
                               (0,) * len(conv.size), conv.groups)  # fmt: skip
    assert y.shape == conv.output_shape
    assert float((y - wanted).abs().max()) <= allowed(conv, operators.build(spec).cost(conv).error_bound, x, w, b)


@every_method
@few
@given(conv=convolutions(), seed=seeds)
def test_output_equals_the_definition_within_the_bound(spec, conv, seed):
    method = operators.build(spec)
    conv = fitted(conv, spec)
    x, w, b = operands(conv, seed)
    before = x.clone(), w.clone()
    y = operators.convolve(x, w, b, spec, **options(conv))
    assert y.dtype == x.dtype
    assert y.shape == conv.output_shape
    error = np.abs(y.numpy() - expected(conv, x, w, b)).max()
    assert error <= allowed(conv, method.cost(conv).error_bound, x, w, b)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


@every_method
@settings(max_examples=8)
@given(conv=convolutions(axes=(2,)), seed=seeds)
def test_gradients_equal_the_definition(spec, conv, seed):
    method = operators.build(spec)
    conv = fitted(conv, spec)
    x, w, b = (t.requires_grad_() for t in operands(conv, seed))
    y = operators.convolve(x, w, b, spec, **options(conv))
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    y.backward(grad)
    of_x = reference.input_gradient(grad.numpy(), w.detach().numpy(), conv.size, **options(conv))
    of_w = reference.weight_gradient(x.detach().numpy(), grad.numpy(), conv.kernel, **options(conv))
    # Sums of other lengths than the forward pass, hence the bound of the definition times the method's excess.
    excess = max(1.0, method.cost(conv).error_bound / conv.terms)
    eps = torch.finfo(torch.float32).eps
    terms_x, terms_w = conv.out_channels * 25, conv.batch * np.prod(conv.output)
    largest = [float(t.detach().abs().max()) for t in (grad, w, x)]
    assert np.abs(x.grad.numpy() - of_x).max() <= excess * eps * terms_x**2 * largest[0] * largest[1]
    assert np.abs(w.grad.numpy() - of_w).max() <= excess * eps * terms_w**2 * largest[0] * largest[2]
    assert torch.allclose(b.grad, grad.sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


@every_method
def test_gradcheck_in_float64(spec):
    conv = Convolution(1, 4, 4, (11, 12), (3, 3), (1, 1), (1, 1), (1, 1), 2, "float64")
    if operators.build(spec).refuses(conv):
        with pytest.raises(BadInput, match="cannot compute"):
            operators.convolve(*operands(conv, 0), spec, **options(conv))
        return
    values = tuple(t.requires_grad_() for t in operands(conv, 3))

    def run(x, w, b):
        return operators.convolve(x, w, b, spec, **options(conv))

    assert torch.autograd.gradcheck(run, values, fast_mode=True)


@every_method
def test_micro_batches_change_nothing_but_rounding(spec):
    conv = fitted(USUAL, spec).with_batch(5)
    x, w, b = operands(conv, 1)
    w.requires_grad_()
    whole = operators.convolve(x, w, b, spec, **options(conv))
    (of_whole,) = torch.autograd.grad(whole.square().sum(), w)
    bound = operators.build(spec).cost(conv).error_bound
    for piece in (1, 2, 4):
        divided = operators.convolve(x, w, b, spec, micro_batch=piece, **options(conv))
        assert float((whole - divided).detach().abs().max()) <= 2 * allowed(conv, bound, x, w.detach(), b)
        (of_divided,) = torch.autograd.grad(divided.square().sum(), w)
        assert torch.allclose(of_whole, of_divided, rtol=1e-3, atol=1e-4 * float(of_whole.abs().max()))


@every_method
def test_any_strides_of_the_input(spec):
    """Views, channels-last tensors and expanded ones give what their copies give."""
    conv = fitted(USUAL, spec)
    x, w, b = operands(conv, 2)
    wanted = operators.convolve(x, w, b, spec, **options(conv))
    wide = torch.stack([x, x], -1)[..., 0]
    assert torch.allclose(operators.convolve(wide, w, b, spec, **options(conv)), wanted, rtol=1e-4, atol=1e-4)
    if x.dim() == 4:
        last = x.contiguous(memory_format=torch.channels_last)
        assert torch.allclose(operators.convolve(last, w, b, spec, **options(conv)), wanted, rtol=1e-4, atol=1e-4)


@every_method
@few
@given(conv=convolutions())
def test_costs_are_sane(spec, conv):
    method = operators.build(spec)
    conv = fitted(conv, spec)
    cost = method.cost(conv)
    assert cost.multiplications > 0
    assert cost.depth >= 0
    assert cost.workspace_nbytes >= 0
    assert cost.error_bound > 1


def test_the_twins_agree_with_each_other():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 9, 8)), rng.standard_normal((4, 3, 3, 3))
    wanted = reference.convolve(x, w, padding=(1, 2))
    for found in (reference.by_im2col, reference.by_fft, lambda *a: reference.by_winograd(*a)[0]):
        np.testing.assert_allclose(found(x, w, (1, 2)), wanted, rtol=1e-10, atol=1e-10)


def test_refusals_are_one_sentence():
    x, w = torch.zeros(1, 2, 8, 8), torch.zeros(3, 2, 3, 3)
    with pytest.raises(UnknownName, match="unknown convolution method 'winogradd'; did you mean 'winograd'"):
        operators.convolve(x, w, method="winogradd")
    with pytest.raises(BadInput, match="only stride 1"):
        operators.convolve(x, w, method="winograd", stride=2)
    with pytest.raises(BadInput, match="2 or 4 outputs"):
        operators.convolve(x, w, method="winograd(3)")
    with pytest.raises(BadInput, match="does not fit"):
        operators.convolve(x, torch.zeros(3, 5, 3, 3))
    with pytest.raises(BadInput, match="larger than its padded input"):
        operators.convolve(x, torch.zeros(3, 2, 9, 9))
    with pytest.raises(BadInput, match="not strides"):
        operators.convolve(x, w, strides=2)
    with pytest.raises(BadInput, match="float32"):
        operators.convolve(x.half(), w.half())
    for name, value in (("stride", 0), ("padding", -1), ("dilation", 0)):
        with pytest.raises(BadInput, match=f"the {name} of a convolution is"):
            operators.convolve(x, w, method="direct", **{name: value})


@every_method
def test_a_bias_that_does_not_fit_is_refused(spec):
    conv = fitted(USUAL, spec)
    x, w, b = operands(conv, 0)
    for bias in (b[:1], torch.cat([b, b]), b.double() if b.dtype == torch.float32 else b.float(), b[None]):
        with pytest.raises(BadInput, match=r"a bias has 8 values of torch\.float32 here, not"):
            operators.convolve(x, w, bias, spec, **options(conv))


@every_method
def test_a_batch_of_nothing_gives_nothing(spec):
    conv = fitted(USUAL, spec)
    x, w, b = (t.requires_grad_() for t in operands(conv, 0))
    y = operators.convolve(x[:0], w, b, spec, **options(conv))
    assert y.shape == (0, *conv.output_shape[1:])
    y.sum().backward()
    assert not w.grad.any()


@pytest.mark.parametrize("spec", [spec for name in operators.names() for spec in operators.candidates(name)])
def test_what_a_tuner_tries_is_right_on_larger_inputs(spec):
    for conv in (
        Convolution(2, 3, 4, (33, 50), (5, 5), (1, 1), (2, 2), (1, 1)),
        Convolution(1, 8, 8, (40, 40), (9, 9), (1, 1), (4, 4), (1, 1), 8),
        Convolution(1, 2, 2, (20_000,), (300,), (1,), (150,), (1,)),
    ):
        method = operators.build(spec)
        if method.refuses(conv):
            continue
        x, w, b = operands(conv, 0)
        y = operators.convolve(x, w, b, spec, **options(conv)).double()
        exact = operators.convolve(x.double(), w.double(), b.double(), **options(conv))
        assert float((y - exact).abs().max()) <= allowed(conv, method.cost(conv).error_bound, x, w, b)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("spec", ["fft", "fft(1024)"])
def test_long_signals_of_few_channels(spec, groups):
    conv = Convolution(3, 4, 6, (3000,), (200,), (2,), (7,), (1,), groups, "float64")
    x, w, b = (t.requires_grad_() for t in operands(conv, 0))
    y, exact = (operators.convolve(x, w, b, method, **options(conv)) for method in (spec, "native"))
    torch.testing.assert_close(y, exact)
    for found, wanted in zip(*(torch.autograd.grad(z.square().sum(), [x, w, b]) for z in (y, exact)), strict=True):
        torch.testing.assert_close(found, wanted)


@every_method
def test_memory_made_in_inference_mode_serves_outside_of_it(spec):
    conv = fitted(Convolution(2, 6, 8, (31, 33), (3, 3), (1, 1), (1, 1), (1, 1)), spec)
    x, w, b = operands(conv, 0)
    with torch.inference_mode():
        inside = operators.convolve(x, w, b, spec, **options(conv)).clone()
    assert torch.equal(operators.convolve(x, w, b, spec, **options(conv)), inside)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("side", [3, 600])
def test_memory_for_results_is_what_torch_would_make(side, channels_last):
    """Small ones are torch's, large ones NumPy's, in huge pages."""
    found = fresh((1, 4, side, side), torch.float32, channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    like = torch.empty((1, 4, side, side), memory_format=order)
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
    found.fill_(2.0)
    assert float(found.sum()) == 2.0 * found.numel()


@pytest.mark.parametrize("method", ["fft", "fft(8)", "winograd(2)", "winograd(4)", "im2col"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_infinity_stays_where_it_is(method: str, value: float) -> None:
    """Transforms would spread it over tiles, or over everything."""
    x, weight = torch.randn(2, 2, 16, 16), torch.randn(3, 2, 3, 3, requires_grad=True)
    x[1, 0, 3, 3] = value
    expected = torch.nn.functional.conv2d(x, weight, padding=1)
    for own in (weight, weight.detach()):
        found = convolve(x, own, method=method, padding=1)
        assert torch.equal(found.isfinite(), expected.isfinite())


def test_padding_by_name() -> None:
    x, weight = torch.randn(1, 2, 9, 9), torch.randn(3, 2, 3, 5)
    for padding in ("same", "valid"):
        expected = torch.nn.functional.conv2d(x, weight, padding=padding)
        torch.testing.assert_close(convolve(x, weight, method="im2col", padding=padding), expected)
    with pytest.raises(BadInput, match="reaches as far on both sides"):
        convolve(x, weight[..., :4], padding="same")
    with pytest.raises(BadInput, match="no stride"):
        convolve(x, weight, padding="same", stride=2)
    with pytest.raises(UnknownName, match="did you mean 'same'"):
        convolve(x, weight, padding="some")
