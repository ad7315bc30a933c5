"""Layers as products of thin ones: matrices by their singular values, convolutions by Tucker's decomposition.

Callers: users, before `laconic.shrink`, which prunes and codes the thin layers like any others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.shrinking.retrain import tied
from laconic.shrinking.sparse_layers import reaches_inside


@dataclass(frozen=True)
class Factored:
    """A layer that was replaced: its ranks, parameters before and after, and ‖W − W'‖ / ‖W‖."""

    name: str
    ranks: tuple[int, ...]
    before: int
    after: int
    error: float


@torch.no_grad()
def factorise(model: nn.Module, energy: float = 0.95) -> list[Factored]:
    """Replace layers of a model by thinner ones that keep `energy` of their weights' squares, where that saves.

    W (out × in) becomes U V of rank r: r (out + in) weights. A convolution becomes 1×1, k×k between r_in and r_out
    channels, and 1×1: the first and last mix channels.

    Args:
        model: is changed.
        energy: the share of Σ w² that is kept in each dimension, above 0 and at most 1.

    Returns:
        What was replaced; layers that would grow are left, and so are those within torch's own, such as attention,
        and those whose weight is used elsewhere, too.

    >>> thin = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 64))
    >>> wide = nn.Sequential(nn.Linear(64, 64))
    >>> _ = wide[0].weight.data.copy_(thin[1].weight @ thin[0].weight)
    >>> [(each.name, each.ranks, each.after) for each in factorise(wide, 0.9999)]
    [('0', (4,), 512)]

    Source: Denton et al., Exploiting Linear Structure Within Convolutional Networks, NIPS 2014; Kim et al., Compression
    of Deep Convolutional Neural Networks for Fast and Low Power Mobile Applications, ICLR 2016 (Tucker-2).
    Differs: ranks from the energy of the singular values, where Kim et al. estimate them by variational Bayes.
    """
    if not 0 < energy <= 1:
        raise BadInput(f"energy is above 0 and at most 1, got {energy}")
    found = []
    elsewhere = {name for first, others in tied(model).items() for name in (first, *others)}
    for name, layer in list(model.named_modules()):
        if reaches_inside(model.get_submodule(name.rpartition(".")[0])) or f"{name}.weight" in elsewhere:
            continue
        if not isinstance(layer, nn.Linear | nn.Conv2d) or not layer.weight.numel():
            continue
        if isinstance(layer, nn.Linear):
            thin, ranks = _linear(layer, energy)
        elif layer.groups == 1 and layer.padding_mode == "zeros":
            thin, ranks = _convolution(layer, energy)
        else:
            continue
        before, after = (sum(p.numel() for p in m.parameters()) for m in (layer, thin))
        if after >= before or not name:
            continue
        error = float((_product(thin) - layer.weight).norm() / layer.weight.norm().clamp_min(1e-30))
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, thin)
        found.append(Factored(name, ranks, before - _bias(layer), after - _bias(layer), error))
    return found


def _bias(layer: nn.Linear | nn.Conv2d) -> int:
    return 0 if layer.bias is None else layer.bias.numel()


def _rank(values: Tensor, energy: float) -> int:
    """The fewest singular values with that share of the squares."""
    shares = values.double().square().cumsum(0)
    return min(int((shares < energy * shares[-1]).sum()) + 1, values.numel())


def _linear(layer: nn.Linear, energy: float) -> tuple[nn.Sequential, tuple[int, ...]]:
    u, s, v = torch.linalg.svd(_wide(layer.weight), full_matrices=False)
    r = _rank(s, energy)
    first, last = nn.Linear(layer.in_features, r, bias=False), nn.Linear(r, layer.out_features, layer.bias is not None)
    first.weight.copy_(v[:r] * s[:r, None].sqrt())
    last.weight.copy_(u[:, :r] * s[:r].sqrt())
    if layer.bias is not None:
        last.bias.copy_(layer.bias)
    return nn.Sequential(first, last).to(layer.weight), (r,)


def _convolution(layer: nn.Conv2d, energy: float) -> tuple[nn.Sequential, tuple[int, ...]]:
    weight = _wide(layer.weight)
    outputs, so, _ = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    inputs, si, _ = torch.linalg.svd(weight.transpose(0, 1).flatten(1), full_matrices=False)
    ro, ri = _rank(so, energy), _rank(si, energy)
    u, v = outputs[:, :ro], inputs[:, :ri]
    core = torch.einsum("oikl,or,is->rskl", weight, u, v)
    first = nn.Conv2d(layer.in_channels, ri, 1, bias=False)
    middle = nn.Conv2d(ri, ro, layer.kernel_size, layer.stride, layer.padding, layer.dilation, bias=False)  # type: ignore[arg-type]
    last = nn.Conv2d(ro, layer.out_channels, 1, bias=layer.bias is not None)
    first.weight.copy_(v.t()[:, :, None, None])
    middle.weight.copy_(core)
    last.weight.copy_(u[:, :, None, None])
    if layer.bias is not None and last.bias is not None:
        last.bias.copy_(layer.bias)
    return nn.Sequential(first, middle, last).to(layer.weight), (ri, ro)


def _wide(weight: Tensor) -> Tensor:
    """A weight as singular values are computed: in float32 at least."""
    if not bool(weight.isfinite().all()):
        raise BadInput("a weight is NaN or infinite: training has diverged; train the model at a lower rate")
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _product(thin: nn.Sequential) -> Tensor:
    """The weight that thin layers stand for."""
    matrices = list(thin.parameters())[: len(thin)]  # the last may be followed by a bias
    if len(matrices) == 2:
        return matrices[1] @ matrices[0]
    return torch.einsum("rskl,or,si->oikl", matrices[1], matrices[2][:, :, 0, 0], matrices[0][:, :, 0, 0])
