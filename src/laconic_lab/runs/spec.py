"""The specs of a run and of a trial, and the names of configurations.

    ddp  ddp-fp16  ddp-powersgd    the peers
    single                         one process with the whole batch
    compress:dynamic8              laconic.compress on DDP
    distribute:dynamic8            laconic.distribute
    distribute:none@local(8)       laconic.distribute(consistency="local(8)")
    divide:dynamic8@stages(micro=8)                      laconic.divide; so is the next, with a codec for each way
    divide:qsgd(4)/fp16@fc1=dense(output); fc2=dense(input)
    elastic:dynamic8               laconic.elastic; for `laconic train`
    distribute:dynamic8,feedback=false,algorithm=ring    the same with options of the door
    compress:auto,quality=noise(0.1)                     the codecs that mind the loss
    compress:topk(0.01),warm_up=20                       20 steps each with 25 %, 6.25 % and 1.6 % of the values first

A bare codec, `dynamic8`, means `compress:dynamic8`, since the exchange then overlaps with backward. With a mode, or on
an engine that DDP does not have (MPI), it means `distribute:dynamic8`.

Callers: the command line makes a RunSpec; `train` and `compare` make a TrialSpec of it for each training, which every
worker is given.
"""

from __future__ import annotations

import bisect
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from laconic.codecs import codec
from laconic.codecs import names as codec_names
from laconic.codecs.plans import flat_codec
from laconic.consistency import build as build_mode
from laconic.consistency.elastic.door import way_for
from laconic.consistency.modes.robust import Robust
from laconic.errors import BadInput, UnknownName
from laconic.exchange.costs import coded_names
from laconic.exchange.options import Options, sparsity_warm_up
from laconic.parallel import Boundary, Plan, Stages
from laconic.specs import pieces
from laconic.specs import split as split_spec
from laconic.workloads import AS_DECLARED, Changes, Workload
from laconic_lab.records.record import DOORS, Configuration, Door
from laconic_lab.runs.strategies import PEERS, WARM_UP


@dataclass(frozen=True)
class RunSpec:
    """A training, or a comparison of several.

    Attributes:
        workload: its name, or module:factory.
        workers: how many train together.
        configurations: ways of training by name.
        seeds: one trial of each configuration for each.
        algorithm: of the compressed all-reduce.
        link: emulated links; None for the machine as it is.
        between: the emulated link between two sites of half the hosts each; None is one site.
        hosts: emulated hosts; None for one per worker where links are emulated.
        changes: what is asked of the workload in place of its own.
        slow: the last worker computes this many times as long.
        tuning_runs: how many runs it took to choose the settings.
        runs: the folder of all runs.
        command: as the user typed it.
    """

    workload: str
    workers: int = 4
    configurations: Sequence[str] = ("none",)
    seeds: Sequence[int] = (0,)
    algorithm: str = "auto"
    link: str | None = None
    hosts: int | None = None
    between: str | None = None
    changes: Changes = AS_DECLARED
    slow: float = 1.0
    tuning_runs: int | None = None
    runs: Path = Path("runs")
    command: str = ""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise BadInput("--seeds must be at least 1")
        if wrong := [seed for seed in self.seeds if not 0 <= seed < 2**63]:
            raise BadInput(f"--seed must be from 0 to below 2⁶³, got {wrong[0]}")
        if not 1 <= self.slow < 1000:
            raise BadInput(f"--slow must be from 1 to below 1000, got {self.slow}")


@dataclass(frozen=True)
class TrialSpec:
    """One training, as every worker gets it.

    Attributes:
        order: the trial's position in the run.
        folder: the run's, for metrics, requests and checkpoints; None for no file at all.
        keeps: whether checkpoints are written.
        resume: the step of the checkpoint to go on from; 0 without one.
        begin: a file of weights that the model begins with, as far as they fit; None for the workload's own start.
        start: which start of the run this is; the first is 1.
        index: which of the workers it is, where each is started by itself.
        link_bps: the emulated links' rate, for choosing between exchanges of one round and of two; None if unlimited.
        counted_by: "interface" where each worker has a network interface of its own, "exchange" otherwise.
        launched: started by torchrun or mpiexec, whose signals reach the ranks themselves.
        slow: the last rank computes this many times as long, by sleeping; 1 does not.
    """

    workload: str
    configuration: Configuration
    seed: int
    changes: Changes = AS_DECLARED
    order: int = 0
    folder: str | None = None
    keeps: bool = False
    resume: int = 0
    begin: str | None = None
    start: int = 1
    index: int = 0
    link_bps: float | None = None
    counted_by: str = "exchange"
    launched: bool = False
    slow: float = 1.0


class PreparedRun:
    """A trial's task, read in `loading_s`; `samples_per_step` is over all workers, in the mean.

    Attributes:
        ends: how many steps have been made at the end of each epoch.
    """

    def __init__(self, trial: TrialSpec, workload: Workload) -> None:
        if workload.dataset.startswith("rcv1"):
            import sklearn.datasets  # noqa: F401 - the clock measures the reading, not the loading of a library
        begun = time.perf_counter()
        self.workload, self.task = workload, workload.prepare(trial.seed)
        self.loading_s = time.perf_counter() - begun
        workers, self._samples = trial.configuration.workers, len(self.task.data.train)
        per_epoch = [self.task.steps_per_epoch(workers, epoch) for epoch in range(workload.epochs)]
        self.ends = list(itertools.accumulate(per_epoch))
        self.total_steps = self.ends[-1]
        self.samples_per_step = workload.epochs * self._samples / self.total_steps

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number within it."""
        epoch = bisect.bisect_right(self.ends, step)
        return epoch, step - (self.ends[epoch - 1] if epoch else 0)

    def samples_at(self, step: int) -> int:
        """Samples used after so many steps."""
        epoch, within = self.place(step)
        if epoch == len(self.ends):
            return epoch * self._samples
        begun = self.ends[epoch - 1] if epoch else 0
        return round((epoch + within / (self.ends[epoch] - begun)) * self._samples)


SINGLE, PIPELINE = "single", "pipeline"
_OPTION = re.compile(r"\w+\s*=")
_SPEC_VALUE = re.compile(r"^(\s*\w+\s*=\s*)([A-Za-z]\w*\(.*\))\s*$")  # a value that is a spec: noise(0.1)
_NAME = re.compile(r"(?:([a-z]+):)?([^@:]+)(?:@(.+))?")


def configuration(name: str, workers: int, algorithm: str = "auto", engine: str = "gloo") -> Configuration:
    """The configuration a name means.

    >>> [configuration(name, 4).name for name in ("ddp", "dynamic8", "none@local(4)")]
    ['ddp', 'compress:dynamic8', 'distribute:none@local(4)']
    >>> configuration("distribute:dynamic8,feedback=false", 4).options
    {'feedback': False}

    Raises:
        UnknownName: none of these; the valid ones are listed.
        BadInput: a codec's arguments that it does not take, or a codec, mode or option that does not go with the door.
    """
    whole, (name, options) = name, _options(name)
    if options and (name in (*PEERS, SINGLE) or parse(name)[0] in ("elastic", "divide")):
        raise BadInput(f"'{whole}': options go with compress and distribute")
    valid = coded_names()
    if algorithm not in valid:
        raise UnknownName("compressed all-reduce algorithm", algorithm, valid)
    if name == SINGLE:
        return Configuration(SINGLE, "single", "none", "none", "none", 1, "none")
    if name in PEERS:
        peer = PEERS[name]
        return Configuration(name, "peer", peer.codec, "ddp", "sync", workers, "gloo", dict(peer.options))
    door, spec, mode = parse(name)
    if door == "elastic":
        return _elastic(spec, mode, workers, algorithm)
    if door == "divide":
        if algorithm != "auto":
            raise BadInput(f"--algorithm {algorithm} is of all-reduces of gradients: '{name}' sends activations")
        return _divided(spec, mode, workers, engine)
    _check_codec(spec)
    mode = str(build_mode(mode))
    if algorithm != "auto" and (mode != "sync" or spec == "auto"):
        raise BadInput(f"--algorithm {algorithm} goes with a codec and consistency sync: '{name}' chooses its own")
    door = door or ("compress" if mode == "sync" and engine == "gloo" else "distribute")
    if door == "compress" and (mode != "sync" or engine != "gloo"):
        cure = f"use distribute:{spec}@{mode}"
        raise BadInput(f"'{name}': compress is DDP's, which agrees at every step, on gloo; {cure}")
    Options.of({key: value for key, value in options.items() if key != WARM_UP}, door)  # refuses unknown ones
    if WARM_UP in options:
        if not isinstance(options[WARM_UP], int) or options[WARM_UP] < 1:
            raise BadInput(f"'{whole}': warm_up is a whole number of steps of at least 1")
        sparsity_warm_up(spec, steps_per_epoch=options[WARM_UP])  # refuses what cannot be warmed up
    given = "".join(f",{key}={str(value).lower()}" for key, value in options.items())
    return Configuration(_full(door, spec, mode) + given, door, spec, algorithm, mode, workers, engine, options)


def _options(name: str) -> tuple[str, dict[str, Any]]:
    """A configuration's name and the options after it."""
    base, *parts = pieces(name)
    parts = [_SPEC_VALUE.sub(r"\1'\2'", part) for part in parts]
    _, arguments = split_spec("configuration", f"options({','.join(parts)})")
    if strange := [value for key, value in arguments if key is None]:
        raise BadInput(f"'{name}': an option is written as name=value, got '{strange[0]}'")
    return base, {str(key): value for key, value in arguments}


def parse(name: str) -> tuple[Door | None, str, str]:
    """Door, codec and mode of a name; the mode is sync where none is named.

    >>> parse("distribute:topk(0.01)+qsgd(4)@local(8)")
    ('distribute', 'topk(0.01)+qsgd(4)', 'local(8)')

    Raises:
        BadInput: not of the form DOOR:CODEC@MODE.
    """
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise BadInput(f"a configuration is a codec, DOOR:CODEC or DOOR:CODEC@MODE, got '{name}'")
    if found[1] is not None and found[1] not in DOORS:
        raise UnknownName("way to train", found[1], DOORS)
    return cast(Door | None, found[1]), found[2].strip(), (found[3] or "sync").strip()


def with_mode(name: str, mode: str, door: Door | None = None) -> str:
    """The same configuration by another mode, and door if one is named; peers and `single` have their own.

    >>> with_mode("dynamic8", "local(8)"), with_mode("ddp", "local(8)"), with_mode("none", "sync", "elastic")
    ('dynamic8@local(8)', 'ddp', 'elastic:none')
    """
    if name in (*PEERS, SINGLE) or name.startswith("divide:"):
        return name
    base, *options = pieces(name)
    own_door, spec, own_mode = parse(base)
    door, mode = door or own_door, mode if own_mode == "sync" else own_mode
    return ",".join([_full(door, spec, mode), *options])


def _full(door: str | None, spec: str, mode: str) -> str:
    return (f"{door}:" if door else "") + spec + ("" if mode == "sync" else f"@{mode}")


def _check_codec(spec: str) -> None:
    if spec == "auto":
        return
    first = re.split(r"[(+]", spec)[0].strip()
    if first not in codec_names():
        raise UnknownName("configuration", first, [*codec_names(), *PEERS, SINGLE, "auto"])
    codec(spec)  # refuses arguments that do not fit


def _elastic(spec: str, mode: str, workers: int, algorithm: str) -> Configuration:
    if spec == "auto":
        raise BadInput("--codec auto is chosen by links between ranks that stay: name a codec for --elastic")
    flat_codec(spec)
    way = way_for(mode, workers)
    if isinstance(way, Robust):  # a rule wants every single gradient, at the coordinator
        if algorithm != "auto":
            raise BadInput(f"--elastic by {way} collects gradients at a coordinator: it takes no --algorithm")
        algorithm = "coordinator"
    return Configuration(_full("elastic", spec, str(way)), "elastic", spec, algorithm, str(way), workers, "zmq")


def _divided(spec: str, division: str, workers: int, engine: str) -> Configuration:
    """A model divided over all workers, each with rows of its own; what stands after the @ is the division."""
    if division == "sync":
        raise BadInput("divide is followed by a division: divide:CODEC@fc1=dense(output); fc2=dense(input)")
    forward, slash, backward = (part.strip() for part in spec.partition("/"))
    plan, boundary = Plan.of(division), Boundary.of((forward, backward) if slash else forward)
    if isinstance(plan.alone, Stages) and plan.alone.delta:
        raise BadInput("delta needs a number for each sample, which the laboratory does not hand on: leave it out")
    how, options = "swap" if plan.alone is None else PIPELINE, {"division": str(plan)}
    return Configuration(f"divide:{spec}@{plan}", "divide", str(boundary), how, "sync", workers, engine, options)


def combined(names: Sequence[str], modes: Sequence[str], workers: int) -> list[Configuration]:
    """Every codec with every mode; peers, `single` and divisions, which have their own, once.

    >>> [each.name for each in combined(["ddp", "none"], ["sync", "local(4)"], 4)]
    ['ddp', 'compress:none', 'distribute:none@local(4)']

    Raises:
        BadInput: a mode that none of them takes.
    """
    made = [configuration(with_mode(name, mode), workers) for name in names for mode in modes]
    taken = {each.consistency for each in made}
    if unused := [mode for mode in modes if str(build_mode(mode)) not in taken | {"sync"}]:
        raise BadInput(f"--consistency {unused[0]} goes with codecs, and none of {', '.join(names)} leaves it open")
    return list({each.name: each for each in made}.values())


def split(text: str) -> list[str]:
    """Split at commas outside parentheses; an option, `name=value`, belongs to what stands before it.

    >>> split("ddp, topk(16, bucket=512)+qsgd(4), feedback=false")
    ['ddp', 'topk(16, bucket=512)+qsgd(4),feedback=false']

    Raises:
        BadInput: nothing is named, or something twice.
    """
    found: list[str] = []
    for part in (part.strip() for part in pieces(text) if part.strip()):
        if found and _OPTION.match(part):
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise BadInput("no configuration is named; write for example ddp,compress:dynamic8,distribute:dynamic8")
    if twice := [name for name in found if found.count(name) > 1]:
        raise BadInput(f"configuration '{twice[0]}' is named twice")
    return found
