"""Copies that gossiping workers keep of each other: one per edge, identical at both ends.

Callers: `gossip` and `pairs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.poison import poison, poisons
from laconic.errors import BadInput, NonFiniteError
from laconic.exchange.coded import max_nbytes, pack, unpack
from laconic.storage.form import check_like

EVERYONE = -1  # the key of the copy that all neighbours share where each is told the same at every step
_SAMPLE = 4096  # values that a codec's error is measured with


class Edges:
    """One worker's copies: of itself as each neighbour sees it, and of each neighbour; all begin with `start`.

    Both ends of an edge i → j keep the same copy x̂ᵢⱼ of what j knows of i. To update j, i sends C(xᵢ − x̂ᵢⱼ),
    and both add what that decodes to: what a codec leaves out stays in the difference and goes with the next message,
    so nothing else has to be remembered. Without a codec x itself is sent and nothing is kept.

    Attributes:
        tells: messages sent to each neighbour. Copies of one edge are identical only if both ends count the same.
        hears: messages received from each neighbour.
    """

    def __init__(self, start: Tensor) -> None:
        self.start = start.clone()
        self.told: dict[int, Tensor] = {}
        self.heard: dict[int, Tensor] = {}
        self.tells: dict[int, int] = {}
        self.hears: dict[int, int] = {}

    def tell(self, key: int, x: Tensor, coder: Codec, draws: int) -> tuple[Tensor, Tensor]:
        """Encode x for neighbour `key`; return the message and the neighbour's new copy (without a codec, x itself)."""
        if coder.exact:
            return pack([x.view(torch.uint8)]), x
        self.tells[key] = self.tells.get(key, 0) + 1
        known = self.told.setdefault(key, self.start.clone())
        try:
            payload = coder.encode(x - known, step=draws)
        except NonFiniteError:
            payload = poison(x.numel())
        _add(known, payload, coder)
        return pack([payload]), known

    def hear(self, peer: int, message: Tensor, coder: Codec) -> Tensor:
        """Apply a message of `peer` and return the copy of its weights; PayloadError if `tell` did not make it."""
        (payload,), _ = unpack(message, 1)
        if coder.exact:
            return payload.view(torch.float32)
        self.hears[peer] = self.hears.get(peer, 0) + 1
        known = self.heard.setdefault(peer, self.start.clone())
        _add(known, payload, coder)
        return known

    def forget_told(self, key: int) -> None:
        """Reset the copy that `key` keeps of this worker."""
        self.told.pop(key, None)
        self.tells.pop(key, None)

    def forget_heard(self, peer: int) -> None:
        """Reset this worker's copy of `peer`."""
        self.heard.pop(peer, None)
        self.hears.pop(peer, None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start.clone(),
            "told": {str(key): value.clone() for key, value in self.told.items()},
            "heard": {str(key): value.clone() for key, value in self.heard.items()},
            "tells": {str(key): count for key, count in self.tells.items()},
            "hears": {str(key): count for key, count in self.hears.items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        what = "the state of gossip"
        check_like(state, {"start": self.start, "told": {}, "heard": {}, "tells": {}, "hears": {}}, what)
        for kind, like in (("told", self.start), ("heard", self.start), ("tells", 0), ("hears", 0)):
            check_like(state[kind], dict.fromkeys(state[kind], like), what)
            if strange := [key for key in state[kind] if not str(key).removeprefix("-").isdigit()]:
                raise BadInput(f"{what} does not fit: '{kind}.{strange[0]}' is not a rank's")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = state["start"].to("cpu", copy=True)
        self.told = {int(key): value.to("cpu", copy=True) for key, value in state["told"].items()}
        self.heard = {int(key): value.to("cpu", copy=True) for key, value in state["heard"].items()}
        self.tells = {int(key): count for key, count in state["tells"].items()}
        self.hears = {int(key): count for key, count in state["hears"].items()}


def message_nbytes(coder: Codec, numel: int) -> int:
    """The most a message of `tell` can take."""
    return max_nbytes([4 * numel if coder.exact else coder.max_nbytes(numel)])


def _add(known: Tensor, payload: Tensor, coder: Codec) -> None:
    """Add at both ends, to the same bits; NaN travels as it would without a codec."""
    if poisons(payload, known):
        return
    if coder.unbiased:
        known.add_(coder.decode(payload, known.numel()), alpha=share_kept(coder))
    else:
        coder.decode_add(payload, known)


def trust(coder: Codec) -> float:
    """γ unless the user says otherwise: δ² of `share_kept`.

    Measured on 4 workers with 256 Gaussian values through topk(0.1), δ² left 10 to 10⁵ times less distance after 120
    steps than δ did, depending on the graph; through 8-bit codecs δ and δ² are 1.
    """
    return share_kept(coder) ** 2


_kept: dict[str, float] = {}


def share_kept(coder: Codec) -> float:
    """The share δ of a Gaussian vector's energy that the codec keeps.

    1 − ‖x − C(x)‖² / ‖x‖² for biased codecs; 1/(1 + ‖x − C(x)‖²/‖x‖²) for unbiased ones, whose values are multiplied by
    it, as only so their error is smaller than their input.

    >>> from laconic.codecs import codec
    >>> [round(share_kept(codec(spec)), 1) for spec in ("none", "dynamic8", "onebit", "topk(0.1)")]
    [1.0, 1.0, 0.6, 0.5]
    """
    if str(coder) not in _kept:
        x = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))
        error = float((x - coder.decode(coder.encode(x), _SAMPLE)).square().sum() / x.square().sum())
        _kept[str(coder)] = 1 / (1 + error) if coder.unbiased else max(1 - error, 1e-3)
    return _kept[str(coder)]
