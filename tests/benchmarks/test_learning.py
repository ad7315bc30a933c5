"""The order of the trainings that ask how little can be sent, and what its table says of aims."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.training.learning import OPTIMIZERS, WORKS, Training, rows, trainings


def _kept(work: str, way: str, seed: int, loss: float, rate: float = 1.0, sent: float = 1.0) -> dict[str, Any]:
    training = asdict(Training(work, way, seed, WORKS[work], rate))
    nbytes = {"dense_nbytes": 40.0, "sent_nbytes": sent, "late_dense_nbytes": 32.0, "late_sent_nbytes": 1.0}
    return {**training, **nbytes, "loss": loss, "seconds": 250.0, "cpu_s": 100.0}


def test_codecs_come_first_and_of_all_works_the_first_seed() -> None:
    ways, works = ["onebit_adam", "none", "noise(0.2)"], ["shakespeare-gpt", "mnist-mlp"]
    kept: list[dict[str, Any]] = []
    queue = []
    for training in trainings(works, ways, 2, None, (0.3, 1.0), kept):
        queue.append(training)
        loss = 1.0 if training.rate == (0.3 if training.work == "mnist-mlp" else 1.0) else 2.0
        kept.append(_kept(training.work, training.way, training.seed, loss, training.rate))
    found = [(each.way, each.seed, each.work, each.rate) for each in queue]
    gpt, mlp = works
    assert found == [
        ("none", 0, gpt, 1.0), ("none", 0, mlp, 1.0), ("noise(0.2)", 0, gpt, 1.0), ("noise(0.2)", 0, mlp, 1.0),
        ("none", 1, gpt, 1.0), ("none", 1, mlp, 1.0), ("noise(0.2)", 1, gpt, 1.0), ("noise(0.2)", 1, mlp, 1.0),
        ("onebit_adam", 0, gpt, 0.3), ("onebit_adam", 0, gpt, 1.0),
        ("onebit_adam", 0, mlp, 0.3), ("onebit_adam", 0, mlp, 1.0),
        ("onebit_adam", 1, gpt, 1.0), ("onebit_adam", 1, mlp, 0.3),
    ]  # fmt: skip
    assert "onebit_adam" in OPTIMIZERS
    assert [each.steps for each in queue[:2]] == [WORKS[gpt], WORKS[mlp]]


def test_the_table_has_aims_beside_what_was_reached() -> None:
    gpt = "shakespeare-gpt"
    kept = [
        _kept(gpt, "none", 0, 2.0, sent=40.0), _kept(gpt, "noise(0.2)", 0, 2.008, sent=1.9) | {"noise_s": 0.4},
        _kept(gpt, "none", 1, 5.0, sent=40.0),  # a seed that the other has not yet
        _kept(gpt, "onebit_adam", 0, 1.5, 0.3, sent=9.0), _kept(gpt, "onebit_adam", 0, 1.9, sent=9.0),
        _kept("mnist-mlp", "none", 0, 0.1, sent=40.0), _kept("mnist-mlp", "noise(0.2)", 0, 0.11, sent=2.0),
    ]  # fmt: skip
    titles, *body = rows(kept)
    found = {(row[0], row[1]): dict(zip(titles, row, strict=True)) for row in body}
    noise = found[gpt, "noise(0.2)"]
    assert (noise["aim"], noise["reached"]) == ("1.005 of none, 20 times fewer", "yes: 1.0040, 21.1")
    assert noise["measuring"] == "0.40%"
    assert found["mnist-mlp", "noise(0.2)"]["reached"] == "no: 1.1000, 20.0"
    assert found["mnist-mlp", "noise(0.2)"]["aim"] == "1.005 of none, 12 times fewer"
    assert found[gpt, "none"]["aim"] == ""
    assert found[gpt, "onebit_adam"]["rate"] == "0.3"
    assert found[gpt, "onebit_adam"]["reached"] == "adam:none is not there yet; 32.0"
    titles, *body = rows([*kept, _kept(gpt, "adam:none", 0, 1.49, sent=40.0)])
    found = {(row[0], row[1]): dict(zip(titles, row, strict=True)) for row in body}
    assert found[gpt, "onebit_adam"]["reached"] == "yes: 1.0067, 32.0"
