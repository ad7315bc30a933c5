"""`Trick`: Krizhevsky's "one weird trick": data-parallel convolutions, divided dense layers, transfers hidden."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.parallel.plan import Form, one_of, register

SCHEMES = ("all", "turns", "shares")


@register("trick")
@dataclass(frozen=True)
class Trick(Form):
    """A module of divided dense layers that takes the rows of data-parallel ones, in turns.

    K ranks with b rows of n values each: every scheme sends (K − 1)·b·n values a rank forward and, of their gradients,
    as many back. The gradient is that of all K·b rows.

    Args:
        scheme: all (everyone sends everything, one batch of K·b rows), turns (rank 0 sends its b rows, then rank 1, …)
            or shares (everyone sends b/K rows each turn, so that all links are busy). In turns and shares the next
            turn's rows travel while this one's are computed.

    The dense layers are updated once a step, or after every turn by `turns.train_in_passes`.

    Source: Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014, §4.
    """

    scheme: str = "shares"

    def __post_init__(self) -> None:
        one_of("the scheme of the trick", self.scheme, SCHEMES)
