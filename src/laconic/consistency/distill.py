"""Knowledge distillation: one small model learns the outputs of a large one, or of an ensemble.

Callers: users, after `ensemble` or `treenet` has left several members; a student that is distributed itself is trained
by all workers together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laconic.errors import BadInput


def distill_loss(
    student: Tensor, teacher: Tensor, labels: Tensor | None = None, *, temperature: float = 4.0, alpha: float = 0.9
) -> Tensor:
    """α T² KL(softmax(teacher/T) ‖ softmax(student/T)) + (1 − α) CE(student, labels), a mean over the batch.

    T² keeps the soft part's gradients as large as the hard part's, whatever T is. At T = 1, α = 1 and a teacher that
    is sure, it is the plain cross-entropy.

    Args:
        student: logits, (batch, classes); gradients flow here.
        teacher: logits, or logs of probabilities as an `Ensemble` gives; taken as constant.
        labels: class numbers; without them α is 1.
        temperature: T, above zero.
        alpha: the weight of the teacher's part, 0 to 1.

    >>> logits = torch.tensor([[2.0, 0.0, -1.0]])
    >>> round(float(distill_loss(logits, logits)), 6)
    0.0

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015, sections 2 and 2.1.
    Differs: KL for the soft cross-entropy, from which it differs by a constant, the teacher's entropy: zero is agreed.
    """
    if student.shape != teacher.shape or student.dim() != 2:
        shapes = f"{tuple(student.shape)} and {tuple(teacher.shape)}"
        raise BadInput(f"student and teacher must be logits of the same batch and classes, got {shapes}")
    _check(temperature, alpha)
    soft = nn.functional.kl_div(
        (student / temperature).log_softmax(-1),
        (teacher.detach() / temperature).log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    if labels is None:
        return temperature**2 * soft
    return alpha * temperature**2 * soft + (1 - alpha) * nn.functional.cross_entropy(student, labels)


def distill(
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor] | Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    temperature: float = 4.0,
    alpha: float = 0.9,
) -> list[float]:
    """Train `student` to match `teacher`, one step per batch; returns the loss of every step.

    The teacher is in evaluation mode while it predicts, and is restored afterwards.

    Args:
        batches: (x, labels), or x alone: the teacher needs no labels, so any samples will do.
        optimizer: the student's; when it is distributed, all workers train one student.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> teacher, student, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(64, 4)
    >>> losses = distill(teacher, student, [x] * 200, torch.optim.SGD(student.parameters(), 0.5), temperature=1.0)
    >>> losses[-1] < 0.1 * losses[0]
    True
    """
    _check(temperature, alpha)
    losses, training = [], teacher.training
    teacher.eval()
    try:
        for batch in batches:
            x, labels = (batch, None) if isinstance(batch, Tensor) else batch
            with torch.no_grad():
                told = teacher(x)
            optimizer.zero_grad()
            loss = distill_loss(student(x), told, labels, temperature=temperature, alpha=alpha)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    finally:
        teacher.train(training)
    return losses


def _check(temperature: float, alpha: float) -> None:
    if not temperature > 0:
        raise BadInput(f"temperature must be above zero, got {temperature}")
    if not 0 <= alpha <= 1:
        raise BadInput(f"alpha is a share from 0 to 1, got {alpha}")
