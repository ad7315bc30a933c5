"""Error feedback: what a codec left out this time is added next time.

Callers: the compressed collectives, one `Feedback` per channel. A *site* is a place where something is encoded: a slice
of the channel in one round of the schedule, so the second leg of an all-reduce has residuals as well as the first.
Invariant: sent + residual_after = input + residual_before, exactly as the codec's encode_feedback defines it.

Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.compose import Selected
from laconic.codecs.entropy import Entropy
from laconic.errors import BadInput, NonFiniteError

Site = tuple[int, int, int]  # round, start, stop


Mode = Literal["off", "selection", "full"]


def mode_for(codec: Codec) -> Mode:
    """What to feed back: nothing for unbiased codecs and casts, what was not selected where the rest is unbiased, else
    all.

    The noise of an unbiased quantiser averages out by itself. Fed back, it need not stay bounded: QSGD with 7 levels on
    buckets of 512 has up to 3.2 times the variance of its input, and the residual would grow at every step.

    >>> from laconic.codecs import codec
    >>> [mode_for(codec(spec)) for spec in ("qsgd(4)", "topk(0.01)+qsgd(4)+entropy", "topk(0.01)", "dynamic8")]
    ['off', 'selection', 'full', 'full']
    """
    coded = codec.coded if isinstance(codec, Entropy) else codec
    if isinstance(coded, Selected) and coded.quantiser.unbiased:
        return "selection"
    return "off" if codec.unbiased or codec.fine else "full"


class Feedback:
    """The residuals of one bucket, made as they are first needed.

    Args:
        numel: the bucket's length.
        mode: "full" feeds everything back, "selection" only what a selector left out, "off" nothing.
    """

    def __init__(self, numel: int, mode: Mode = "full") -> None:
        self.numel = numel
        self.mode = mode
        self.residuals: dict[Site, Tensor] = {}
        self._copies: dict[Site, int] = {}
        self._owed: Tensor | None = None

    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor:
        """Encode x and what its site still owes; keep what is owed now. A NonFiniteError clears the site.

        `copies` ranks owe the same at this site, for they encode the same sum: each counts for its share.
        """
        if self.mode == "off":
            return codec.encode(x, step=step, out=out)
        residual = self.residuals.get(site)
        if residual is None:
            residual = self.residuals[site] = torch.zeros(x.numel())
            self._copies[site] = copies
        try:
            if self.mode == "selection":
                return codec.encode_selection(x, residual, step=step, out=out)  # type: ignore[attr-defined,no-any-return]
            payload = codec.encode_feedback(x, residual, step=step, out=out)
            if codec.fine:  # casts send NaN and infinity instead of refusing them; they must not stay in the residual
                torch.nan_to_num_(residual, nan=0.0, posinf=0.0, neginf=0.0)
            return payload
        except NonFiniteError:
            residual.zero_()
            raise

    def total(self) -> Tensor:
        """All that is still owed by this rank, as one vector over the bucket."""
        owed = torch.zeros(self.numel)
        for (number, start, stop), residual in self.residuals.items():
            owed[start:stop] += residual / self._copies[number, start, stop]
        return owed

    def restart(self, owed: Tensor) -> None:
        """Begin anew with `owed` still to be sent: for a new schedule, world size, codec or bucket layout."""
        if owed.numel() != self.numel:
            raise BadInput(f"the residual has {owed.numel()} values, the bucket {self.numel}")
        self.residuals.clear()
        self._owed = owed.clone() if bool(owed.any()) else None

    def take_owed(self) -> Tensor | None:
        """What `restart` left to be sent, once: the caller adds it to the next input."""
        owed, self._owed = self._owed, None
        return owed

    def state_dict(self) -> dict[str, Tensor]:
        """Everything owed, as one vector: independent of the schedule and of how the bucket is cut."""
        owed = self.total()
        return {"owed": owed if self._owed is None else owed + self._owed}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what a former Feedback of the same length owed."""
        self.restart(state["owed"])
