"""Objectives: losses and hits per sample, so that shares of a batch add up.

Callers: `Task`. Invariant: both functions return one value per sample, and a sample's value does not depend on the
others in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Objective:
    """A loss and, where there is something to guess right, hits.

    Attributes:
        name: of the loss.
        losses: (output, target) -> loss of each sample.
        hits: (output, target) -> share of each sample guessed right, or None.
        metric: what the target is about, a key of `Task.evaluate`.
        higher_is_better: of that metric.
    """

    name: str
    losses: Callable[[Tensor, Tensor], Tensor]
    hits: Callable[[Tensor, Tensor], Tensor] | None
    metric: str = "accuracy"
    higher_is_better: bool = True

    def scores(self, loss: float, accuracy: float | None) -> dict[str, float]:
        """The scores of an evaluation, from the means over samples."""
        scores = {"loss": loss}
        if accuracy is not None:
            scores["accuracy"] = accuracy
        if self.metric == "bits per character":
            scores["bits per character"] = loss / math.log(2)
        return scores

    def reached(self, scores: dict[str, float], target: float) -> bool:
        """Whether scores are at the target or better; a value that is not a number never is."""
        value = scores[self.metric]
        return value >= target if self.higher_is_better else value <= target


def _right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


def _sequence_entropies(output: Tensor, target: Tensor) -> Tensor:
    losses = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return losses.reshape(target.shape).mean(1)


def _sequence_right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(2) == target).float().mean(1)


def _binary_right(output: Tensor, target: Tensor) -> Tensor:
    return ((output > 0) == (target > 0.5)).float()


CLASSIFICATION = Objective("cross-entropy", partial(functional.cross_entropy, reduction="none"), _right)
NEXT_CHARACTER = Objective(
    "cross-entropy", _sequence_entropies, _sequence_right, metric="bits per character", higher_is_better=False
)
LOGISTIC = Objective(
    "logistic loss", partial(functional.binary_cross_entropy_with_logits, reduction="none"), _binary_right
)
REGRESSION = Objective(
    "squared error", partial(functional.mse_loss, reduction="none"), None, metric="loss", higher_is_better=False
)
