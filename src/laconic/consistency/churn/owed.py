"""What a codec has left out and still owes, in a training whose steps may fail.

Caller: `coded.py`. Invariant: a step that is not committed leaves what is owed as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import NonFiniteError
from laconic.exchange.residuals import mode_for


class Owed:
    """The residual of one sender, e, and what it will be once the step under way is committed.

    encode: p = C(x + e), e' = x + e − decode(p); commit: e ← e'. What an unbiased codec
    leaves out is not kept: it averages out by itself.

    Cost: one copy of e a step, and two vectors of memory where the codec needs feedback.

    >>> from laconic.codecs import codec
    >>> owed = Owed(codec("topk(0.5)"), 2)
    >>> room = torch.empty(99, dtype=torch.uint8)
    >>> for _ in range(2):  # the first time fails
    ...     payload = owed.encode(torch.tensor([1.0, 3.0]), 0, room)
    >>> owed.commit()
    >>> owed.pay(torch.zeros(2))
    tensor([1., 0.])
    """

    def __init__(self, codec: Codec, numel: int) -> None:
        self._codec, self._numel, self._mode = codec, numel, mode_for(codec)
        self.forget()

    def forget(self) -> None:
        """Owe nothing."""
        self._now: Tensor | None = None
        self._next: Tensor | None = None
        self._spare: Tensor | None = None
        self._pending = False

    def encode(self, x: Tensor, draw: int, out: Tensor) -> Tensor | None:
        """The payload of x and what is owed, in `out`; None when they are not finite, and then nothing will be owed."""
        try:
            if self._mode == "off":
                return self._codec.encode(x, step=draw, out=out)
            after = self._begin()
            if self._mode == "selection":
                return self._codec.encode_selection(x, after, step=draw, out=out)  # type: ignore[attr-defined,no-any-return]
            return self._codec.encode_feedback(x, after, step=draw, out=out)
        except NonFiniteError:
            self._next = None
            return None

    def _begin(self) -> Tensor:
        """What is owed now, to be changed into what will be."""
        after = torch.empty(self._numel) if self._spare is None else self._spare
        self._spare = after
        if self._now is None:
            after.zero_()
        else:
            after.copy_(self._now)
        self._next, self._pending = after, True
        return after

    def pay(self, x: Tensor) -> Tensor:
        """Add what is owed to x, exactly; once that is committed nothing is."""
        if self._now is not None:
            x.add_(self._now)
        self._next, self._pending = None, True
        return x

    def commit(self) -> None:
        """The step for which `encode` or `pay` was last called is committed."""
        if self._pending:
            kept, self._now = self._now, self._next
            self._spare = kept if self._next is not None else self._spare
            self._next, self._pending = None, False
