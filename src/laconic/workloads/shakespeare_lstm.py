"""A character LSTM on Shakespeare: the recurrent workload, judged in bits per character."""

from __future__ import annotations

from laconic.workloads.inputs import Tokens
from laconic.workloads.objective import NEXT_CHARACTER
from laconic.workloads.optimizers import adam
from laconic.workloads.registry import register
from laconic.workloads.schedules import linear_decay
from laconic.workloads.workload import Workload


@register("shakespeare-lstm")
def shakespeare_lstm() -> Workload:
    """One LSTM layer of 256 units on windows of 64 characters."""
    return Workload(
        name="shakespeare-lstm",
        dataset="shakespeare",
        model="char-lstm",
        objective=NEXT_CHARACTER,
        optimizer=adam,
        optimizer_name="Adam, rate falling linearly to 0",
        learning_rate=0.004,
        batch=64,
        epochs=8,
        target=2.4,
        inputs=Tokens(),
        schedule=linear_decay,
        data_options=(("length", 64),),
    )
