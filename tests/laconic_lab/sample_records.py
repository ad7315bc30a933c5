"""A made-up record as `laconic compare digits-mlp -n 4 --seeds 3 --link 100mbit` would write it: honest throughout.

The figures are drawn, not measured; they behave as training does, so that the report can be looked at.
"""

from __future__ import annotations

import numpy as np

from laconic.statistics import median
from laconic.workloads.description import Description
from laconic_lab.records.record import (
    Breakdown,
    Clock,
    Configuration,
    Event,
    Interruption,
    LayerRecord,
    LinkSetting,
    Point,
    Record,
    TrialRecord,
)
from laconic_lab.records.summary import make_claims

SHAPES = {
    "0.weight": [512, 64], "0.bias": [512], "2.weight": [512, 512], "2.bias": [512],
    "4.weight": [10, 512], "4.bias": [10],
}  # fmt: skip
WORKERS, BATCH, STEPS, EVERY = 4, 16, 220, 10
# name, kind, codec, share of the bytes sent, seconds to encode and decode, final error
CONFIGURATIONS = [
    ("ddp", "peer", "none", 1.0, 0.0, 0.0, 0.026),
    ("compress:none", "compress", "none", 1.0, 0.0002, 0.0003, 0.0265),
    ("compress:dynamic8", "compress", "dynamic8", 0.2502, 0.0011, 0.0007, 0.027),
    ("compress:topk(0.01)+qsgd(4)", "compress", "topk(0.01)+qsgd(4)", 0.0062, 0.0019, 0.0004, 0.031),
]


def compare_record(seeds: int = 3) -> Record:
    """A finished comparison of four configurations on an emulated link, claims included, lint left empty."""
    record = Record(
        kind="compare",
        id="20261116-101500-digits-mlp",
        created="2026-11-16T10:15:00+00:00",
        command="laconic compare digits-mlp -n 4 --configs ddp,none,dynamic8,topk(0.01)+qsgd(4) --link 100mbit",
        finished=True,
        interruptions=[Interruption("2026-11-16T10:16:12+00:00", 130, 2, "worker 2 was lost and restarted", 4)],
        workload=Description(
            name="digits-mlp", model="64-512-512-10 perceptron", parameters=sum(_numel(s) for s in SHAPES.values()),
            dataset="digits", dataset_source="scikit-learn 1.9.1, bundled", train_samples=1437, test_samples=360,
            target_accuracy=0.95, stopping_rule="220 steps, fixed before the run", optimizer="SGD, momentum 0.9",
            learning_rate=0.05, epochs=9.8, batch_per_worker=BATCH, input_shape=[64], native_shape=[8, 8],
        ),
        scaling="strong",
        clock=Clock("when every worker is ready, before the data is read", True, False, "the slowest rank's, per step"),
        tuning_runs=3,
        link=LinkSetting("100mbit", True, 4),
        environment={
            "cpu": "AMD EPYC 7B13", "cores": 2, "memory_nbytes": 8 << 30, "os": "Linux-6.1-x86_64", "python": "3.12.4",
            "torch": "2.13.0+cpu", "numpy": "2.3.1", "numba": "0.66.0", "laconic": "0.1.0", "commit": "0123456789ab",
            "blas_threads": 1, "load_average_before": 0.21,
        },
        configurations=[
            Configuration(name, kind, codec, "auto", "sync", WORKERS, "gloo", {"feedback": kind != "peer"})
            for name, kind, codec, *_ in CONFIGURATIONS
        ],
    )  # fmt: skip
    for seed in range(seeds):
        for index in range(len(CONFIGURATIONS)):
            record.trials.append(_trial(index, seed, order=len(record.trials)))
    record.claims = make_claims(record, "ddp")
    return record


def _trial(index: int, seed: int, order: int) -> TrialRecord:
    name, _, codec, share, encode_s, decode_s, error = CONFIGURATIONS[index]
    generator = np.random.default_rng([index, seed])
    raw = sum(4 * _numel(shape) for shape in SHAPES.values()) * 2 * (WORKERS - 1) / WORKERS
    wire_s = share * raw * 8 / 100e6 * 1.05 + 0.0008
    parts = Breakdown(0.0042, encode_s, wire_s, 0.0009, decode_s, 0.0003)
    steps = np.sum([getattr(parts, f) for f in Breakdown.__dataclass_fields__]) * generator.lognormal(0, 0.04, STEPS)
    steps *= generator.lognormal(0, 0.015)
    curve = _curve(steps, error, share * raw, generator)
    centre = median(steps.tolist())
    reached = [p.seconds for p in curve if (p.test_accuracy or 0) >= 0.95]
    lost = name == "compress:dynamic8" and seed == 1
    return TrialRecord(
        configuration=name, seed=seed, order=order,
        test_accuracy=curve[-1].test_accuracy, test_loss=curve[-1].test_loss,
        seconds_total=float(steps.sum()), seconds_to_target=reached[0] if reached else None, steps=STEPS,
        samples=STEPS * BATCH * WORKERS, step_seconds_median=centre.value,
        step_seconds_interval=(centre.low, centre.high), step_seconds=steps.tolist(), breakdown=parts,
        sent_nbytes_per_step=share * raw, raw_nbytes_per_step=raw, wire_seconds_per_step=wire_s, curve=curve,
        layers=[
            LayerRecord(layer, shape, _numel(shape), codec if len(shape) > 1 else "none", 4.0 * _numel(shape),
                  4.0 * _numel(shape) * (share if len(shape) > 1 else 1.0))
            for layer, shape in SHAPES.items()
        ],
        events=[Event(float(steps[:130].sum()), 130, 2, "worker 2 was lost and restarted")] if lost else [],
        weights_sha256=f"{index}{seed}" * 32, replicas_identical=True,
    )  # fmt: skip


def _curve(steps: np.ndarray, error: float, nbytes: float, generator: np.random.Generator) -> list[Point]:
    points = []
    for step in [1, *range(EVERY, STEPS + 1, EVERY)]:
        wrong = error + (0.9 - error) * np.exp(-step / (18 + 220 * error)) * generator.lognormal(0, 0.05)
        wrong = float(np.round(wrong * generator.lognormal(0, 0.03) * 360) / 360)
        points.append(Point(step, float(steps[:step].sum()), step * BATCH * WORKERS, 3 * wrong, 1 - wrong,
                            3.3 * wrong, int(step * nbytes)))  # fmt: skip
    return points


def _numel(shape: list[int]) -> int:
    return int(np.prod(shape))
