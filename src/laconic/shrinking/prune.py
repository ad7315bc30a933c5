"""Choose the weights to prune: the smallest ones, within each layer or over all layers, singly or as whole filters.

Callers: the pipeline, users. A mask is a bool tensor of a weight's shape, True where it is kept; `retrain.py` holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor, nn

from laconic.errors import BadInput, UnknownName

SCOPES = ("global", "lamp", "layer")
Density = float | Mapping[str, float]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are pruned and shared: those of two dimensions or more, each once.

    >>> list(weights(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))))
    ['0.weight']
    """
    return {name: p for name, p in model.named_parameters() if p.dim() > 1 and p.dtype == torch.float32}


def magnitude(
    tensors: Mapping[str, Tensor], density: Density, *, scope: str = "lamp", structured: bool = False
) -> dict[str, Tensor]:
    """Masks that keep the largest weights.

    Args:
        tensors: weights by name.
        density: the share that is kept: of all weights, or by name.
        scope: where one number is given, how it is divided: "layer" keeps as much of each tensor, "global" compares
            magnitudes over all of them, "lamp" compares w² / Σ v² over the v that are at least as large in its tensor.
        structured: whole rows of the weight's matrix, such as filters, by their norm.

    >>> magnitude({"w": torch.tensor([[3.0, -1.0, 0.5, -2.0]])}, 0.5)["w"].tolist()
    [[True, False, False, True]]

    Source: Han, Pool, Tran, Dally, Learning both Weights and Connections, NIPS 2015; Lee et al., Layer-adaptive
    Sparsity for the Magnitude-based Pruning, ICLR 2021 (lamp); Li et al., Pruning Filters for Efficient ConvNets, 2017.

    Raises:
        BadInput: a density outside (0, 1].
        UnknownName: no such scope, or a density for a weight that is not there.
    """
    check(density, scope)
    check_names(tensors, density)
    sizes = {name: _sizes(tensor, structured) for name, tensor in tensors.items()}
    if isinstance(density, Mapping) or scope == "layer":
        shares = density if isinstance(density, Mapping) else dict.fromkeys(tensors, density)
        masks = {name: _largest(size, shares.get(name, 1.0)) for name, size in sizes.items()}
    else:
        if not tensors:
            return {}
        scores = {name: _lamp(size) if scope == "lamp" else size for name, size in sizes.items()}
        kept = _largest(torch.cat([score.reshape(-1) for score in scores.values()]), density)
        parts = kept.split([score.numel() for score in scores.values()])
        masks = {name: part.reshape(scores[name].shape) for name, part in zip(scores, parts, strict=True)}
    return {name: _spread(mask, tensors[name]) for name, mask in masks.items()}


def gradual(round_: int, rounds: int, density: float) -> float:
    """The density after round 1 … rounds: d + (1 − d)(1 − t)³, much at first and little in the end.

    Source: Zhu, Gupta, To Prune, or Not to Prune, 2017, equation 1.

    >>> [round(gradual(r, 3, 0.1), 3) for r in (1, 2, 3)]
    [0.367, 0.133, 0.1]
    """
    return density + (1 - density) * (1 - round_ / rounds) ** 3


def check(density: Density, scope: str) -> None:
    """Raise BadInput unless densities are shares, and UnknownName unless there is such a scope."""
    if scope not in SCOPES:
        raise UnknownName("scope of pruning", scope, SCOPES)
    for share in density.values() if isinstance(density, Mapping) else [density]:
        if not isinstance(share, Real) or not 0 < share <= 1:
            raise BadInput(f"a density is a number above 0 and at most 1, got {share!r}")


def check_names(tensors: Mapping[str, Tensor], given: object) -> None:
    """Raise UnknownName where a table by name has one that is no weight."""
    for name in given if isinstance(given, Mapping) else ():
        if name not in tensors:
            raise UnknownName("weight", name, tensors)


def _sizes(tensor: Tensor, structured: bool) -> Tensor:
    """The magnitudes to compare: |w|, or the mean |w| of a row, since rows differ in length."""
    found = tensor.detach().abs()
    return found.flatten(1).square().mean(1).sqrt() if structured and tensor.dim() > 1 else found


def _spread(mask: Tensor, tensor: Tensor) -> Tensor:
    """A mask of rows over their weights."""
    return mask if mask.shape == tensor.shape else mask.reshape(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor).clone()


def _largest(sizes: Tensor, share: float) -> Tensor:
    """True for the largest share · n, rounded, and 1 at least; of equal ones the first."""
    flat = sizes.reshape(-1)
    kept = torch.zeros(flat.numel(), dtype=torch.bool)
    kept[flat.argsort(descending=True, stable=True)[: max(1, round(share * flat.numel()))]] = True
    return kept.reshape(sizes.shape)


def _lamp(sizes: Tensor) -> Tensor:
    """w² / Σ v² over the v ≥ w of the tensor; the largest of each has 1, so that no tensor loses all."""
    squares, order = sizes.reshape(-1).double().square().sort()
    rest = squares.flip(0).cumsum(0).flip(0)
    scores = torch.empty_like(squares)
    scores[order] = squares / rest.clamp_min(torch.finfo(torch.float64).tiny)
    return scores.reshape(sizes.shape)
