"""Sparsity warm-up: send more in the first epochs, when gradients change fastest.

Callers: users, for the codec of `laconic.compress`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from laconic.codecs import Codec, codec
from laconic.codecs.compose import Selected
from laconic.codecs.entropy import Entropy
from laconic.errors import BadInput

PAPER = (0.25, 0.0625, 0.015625, 0.00390625)  # sparsity 75 %, 93.75 %, 98.4375 %, 99.6 %


def sparsity_warm_up(
    final: str | Codec = "topk(0.001)", *, steps_per_epoch: int, fractions: Sequence[float] = PAPER
) -> dict[int, str]:
    """The codec of each step: `final` with one of `fractions` in each of the first epochs, then `final` itself.

    The defaults are the paper's: 75 %, 93.75 %, 98.4375 %, 99.6 % kept back in the first four epochs, then 99.9 %.
    Fractions that are not above `final`'s are left out, and their epochs with them.

    Args:
        final: a selector that takes a fraction, alone or composed, such as "topk(0.001)+qsgd(4)".
        steps_per_epoch: the steps each fraction is used for.
        fractions: the share of elements sent in each epoch.

    Raises:
        BadInput: steps_per_epoch is below 1, a fraction out of range, or `final` takes none.

    >>> sparsity_warm_up(steps_per_epoch=100)
    {0: 'topk(0.25)', 100: 'topk(0.0625)', 200: 'topk(0.015625)', 300: 'topk(0.00390625)', 400: 'topk(0.001)'}
    >>> sparsity_warm_up("topk(0.02)+qsgd(2)", steps_per_epoch=10, fractions=(0.1,))
    {0: 'topk(0.1)+qsgd(2)', 10: 'topk(0.02)+qsgd(2)'}

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, §3.3.
    """
    if isinstance(steps_per_epoch, bool) or not isinstance(steps_per_epoch, int) or steps_per_epoch < 1:
        raise BadInput(f"steps_per_epoch must be a whole number of at least 1, got {steps_per_epoch!r}")
    last = codec(final)
    least = _fraction(last)
    chosen = [_with_fraction(last, fraction) for fraction in fractions if fraction > least]
    return {epoch * steps_per_epoch: str(entry) for epoch, entry in enumerate([*chosen, last])}


def _fraction(chosen: Codec) -> float:
    """The share of elements that a selector sends, below 1."""
    selector: Any = chosen
    while isinstance(selector, Entropy | Selected):
        selector = selector.coded if isinstance(selector, Entropy) else selector.selector
    fraction = getattr(selector, "fraction", None)
    if fraction is None or fraction >= 1:
        raise BadInput(f"a warm-up needs a selector that takes a fraction below 1, such as topk(0.001); got '{chosen}'")
    return float(fraction)


def _with_fraction(chosen: Any, fraction: float) -> Any:
    """The same codec with another fraction; the selector itself refuses one out of range."""
    if isinstance(chosen, Entropy):
        return replace(chosen, inner=_with_fraction(chosen.coded, fraction))
    if isinstance(chosen, Selected):
        return replace(chosen, selector=_with_fraction(chosen.selector, fraction))
    return replace(chosen, fraction=fraction)
