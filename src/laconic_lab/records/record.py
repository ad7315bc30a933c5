"""The record of a run: all that a reader needs to check, repeat or refute it, as one JSON file.

`train` and `compare` fill it, `lint` judges it, `report` draws it. A run is a folder:

    runs/<id>/run.json         this record, replaced as a whole: a reader sees the old one or the new one
    runs/<id>/metrics.jsonl    one JSON object a line, appended while training goes on (`Metrics`)
    runs/<id>/report.html      what `laconic report` makes of the two

All times are in seconds, all sizes in bytes, accuracies from 0 to 1. What is not known is null, never a guess.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from laconic.errors import PayloadError, RecordError
from laconic.exchange.noise import ChosenLayer, Review
from laconic.storage.files import replace
from laconic.storage.json_text import seal, unseal
from laconic.storage.typed_json import from_plain, to_plain
from laconic.workloads.description import Description

FORMAT = 2
Door = Literal["compress", "distribute", "divide", "elastic"]  # through which a configuration of ours trains
DOORS: tuple[Door, ...] = get_args(Door)
FILE = "run.json"


@dataclass(frozen=True)
class Clock:
    """What the times include. `across_ranks`: how the ranks' times become one, e.g. "the slowest rank"."""

    starts: str
    includes_data_loading: bool
    includes_evaluation: bool
    across_ranks: str = ""


@dataclass(frozen=True)
class LinkSetting:
    """The links of the cluster: `spec` as given to `--link`, or null for whatever the machine has; `between` sites."""

    spec: str | None = None
    emulated: bool = False
    hosts: int = 1
    between: str | None = None


@dataclass(frozen=True)
class Interruption:
    """The run stopped, or lost a worker.

    Attributes:
        when: the time, UTC.
        step: how many steps had been made, as far as that is known.
        rank: that failed or was lost.
        lost: how many of the steps have to be made again.
        ended: the whole run ended here and had to be resumed; False when it went on by itself.
    """

    when: str
    step: int | None
    rank: int | None
    what: str
    lost: int = 0
    ended: bool = True


@dataclass(frozen=True)
class Configuration:
    """One way of training.

    Attributes:
        kind: our door, a peer's ("ddp"), or one process alone.
        options: what else a reader should know, as words.
    """

    name: str
    kind: Literal["compress", "distribute", "divide", "elastic", "peer", "single"]
    codec: str
    algorithm: str
    consistency: str
    workers: int
    engine: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it trains through one of our doors."""
        return self.kind in DOORS


@dataclass(frozen=True)
class Breakdown:
    """Where a step's seconds go, medians over the steps. Wait is for peers; other is what no clock covered."""

    compute_s: float
    encode_s: float
    wire_s: float
    wait_s: float
    decode_s: float
    other_s: float = 0.0


@dataclass(frozen=True)
class Point:
    """One evaluation: `seconds`, `samples` and `sent_nbytes` (one worker's) are counted from the start of the trial."""

    step: int
    seconds: float
    samples: int
    train_loss: float | None
    test_accuracy: float | None
    test_loss: float | None
    sent_nbytes: int


@dataclass(frozen=True)
class LayerRecord:
    """What one worker sends of one parameter in a step."""

    name: str
    shape: list[int]
    numel: int
    codec: str
    raw_nbytes: float
    sent_nbytes: float


@dataclass(frozen=True)
class NoiseRecord:
    """What quality "noise" measured and chose, over steps, and layer by layer at the end."""

    budget: float
    reviews: list[Review]
    layers: list[ChosenLayer]


@dataclass(frozen=True)
class TimeSpan:
    """A part of two steps in a row on one lane of their timeline: the training's, or that of a bucket's layers."""

    lane: str
    part: str
    begun_s: float
    seconds: float


@dataclass(frozen=True)
class Event:
    """An event in a trial: a worker lost, a codec switched, a checkpoint read."""

    seconds: float
    step: int
    rank: int | None
    what: str


@dataclass(frozen=True)
class TrialRecord:
    """One training: a configuration and a seed. `order` is its position in the run; bytes are one worker's.

    Staleness: how many updates of others the weights that a worker computed with had not seen, over all steps.
    `failed` is null, or a sentence: trials that broke stay in the record and out of the statistics.
    """

    configuration: str
    seed: int
    order: int
    test_accuracy: float | None
    test_loss: float | None
    seconds_total: float
    seconds_to_target: float | None
    steps: int
    samples: int
    step_seconds_median: float
    step_seconds_interval: tuple[float, float] | None
    sent_nbytes_per_step: float
    raw_nbytes_per_step: float
    wire_seconds_per_step: float | None = None
    step_seconds: list[float] | None = None
    breakdown: Breakdown | None = None
    curve: list[Point] = field(default_factory=list)
    layers: list[LayerRecord] = field(default_factory=list)
    noise: NoiseRecord | None = None
    events: list[Event] = field(default_factory=list)
    timeline: list[TimeSpan] = field(default_factory=list)
    weights_sha256: str | None = None
    replicas_identical: bool | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    failed: str | None = None


Judgement = Literal[
    "better", "worse", "quicker but misses the target", "quicker but less accurate", "no significant difference",
    "too few seeds to say",
]  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """"`configuration` is `ratio` times as quick as `baseline`": above 1 is quicker. See `summary.py`."""

    what: str
    configuration: str
    baseline: str
    ratio: float
    interval: tuple[float, float] | None
    p_value: float | None
    verdict: Judgement
    accuracy: float | None
    baseline_accuracy: float | None
    test: str = ""
    normality_p: float | None = None


@dataclass(frozen=True)
class Finding:
    """The lint's verdict on one rule, and its evidence."""

    rule: str
    title: str
    verdict: Literal["pass", "fail", "cannot know"]
    evidence: str


@dataclass
class Record:
    """The whole run.

    Attributes:
        seeds: of each configuration, in the order of their trials; empty for a single training.
        slow: the last worker computed this many times as long.
        starts: how often it was begun or resumed.
    """

    kind: Literal["train", "compare"]
    id: str
    created: str
    command: str
    workload: Description
    scaling: Literal["strong", "weak", "none"]
    clock: Clock
    environment: dict[str, Any]
    configurations: list[Configuration]
    link: LinkSetting = field(default_factory=LinkSetting)
    tuning_runs: int | None = None
    seeds: list[int] = field(default_factory=list)
    slow: float = 1.0
    finished: bool = False
    starts: int = 1
    interruptions: list[Interruption] = field(default_factory=list)
    trials: list[TrialRecord] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    lint: list[Finding] = field(default_factory=list)

    def configuration(self, name: str) -> Configuration | None:
        """The configuration of that name, if it is in the record."""
        return next((c for c in self.configurations if c.name == name), None)

    def trials_of(self, name: str) -> list[TrialRecord]:
        """The trials of a configuration that did not fail, by seed."""
        found = [t for t in self.trials if t.configuration == name and t.failed is None]
        return sorted(found, key=lambda t: (t.seed, t.order))

    def to_json(self) -> str:
        """The record as sealed JSON, the format's number first."""
        return seal({"format": FORMAT, **to_plain(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read a record from `to_json`, or one written by hand without a seal.

        Raises:
            RecordError: cut off, changed, of another format, or a field that is missing, unknown or wrong.
        """
        try:
            data = unseal(text, required=False)
        except PayloadError as error:
            raise RecordError(f"the record is {error}") from error
        if "format" not in data:
            raise RecordError("the record has no field 'format': it is not a run's record")
        found = data.pop("format")
        if found != FORMAT:
            raise RecordError(f"the record is of format {found!r}; this version reads {FORMAT}")
        try:
            return from_plain(cls, data, "the record")
        except PayloadError as error:
            raise RecordError(str(error)) from error

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `folder`/run.json, whole or not at all; returns its path."""
        return replace(Path(folder) / FILE, self.to_json())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Record:
        """Read the record of a run, given its folder or its run.json.

        Raises:
            RecordError: there is none, or it cannot be used; the sentence names the file.
        """
        path = Path(folder)
        path = path / FILE if path.is_dir() else path
        try:
            return cls.from_json(path.read_bytes())
        except FileNotFoundError as error:
            raise RecordError(f"no run at {folder}: expected a folder that holds {FILE}") from error
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error}") from error
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error
