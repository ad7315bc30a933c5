"""`laconic.elastic`: synchronous training in which workers may come, go, stop and die at any moment.

Callers: users. Each worker is a process that runs the same script; nothing else has to run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Never

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from laconic.codecs import Codec
from laconic.codecs.compiling import compile_planned
from laconic.codecs.plans import flat_codec
from laconic.consistency.base import Mode, build
from laconic.consistency.blocks import BlockMode
from laconic.consistency.elastic.coded import Coded
from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.fragment_work import ByFragment, FragmentWork
from laconic.consistency.elastic.job import ElasticJob
from laconic.consistency.elastic.meeting import Meeting
from laconic.consistency.elastic.options import ElasticOptions, Samples
from laconic.consistency.elastic.replica import BlockWork, Replica, StepWork
from laconic.consistency.elastic.vectors import Collected, Exact, Rule, weighted_mean
from laconic.consistency.modes.diloco import Diloco
from laconic.consistency.modes.local import BlockMomentum, LocalMode
from laconic.consistency.modes.robust import Robust
from laconic.consistency.modes.sync import Sync
from laconic.errors import BadInput
from laconic.exchange.layout import Exemptions
from laconic.exchange.options import DEFAULT_CODEC

MEETING_VARIABLE = "LACONIC_MEETING"
Way = Sync | Robust | LocalMode | BlockMomentum | Diloco
OWN = "async, stale, and easgd and gossip with asynchronous=true, outlive the loss of a worker by themselves"


def way_for(consistency: str | Mode, workers: int | None = None) -> Way:
    """Build the mode of this spec; BadInput if elastic training does not support it, or needs more `workers`."""
    mode = build(consistency) if isinstance(consistency, str) else consistency
    if not isinstance(mode, Way):
        text = f"elastic trains by sync, robust, local, block_momentum or diloco, not by '{mode}'"
        raise BadInput(f"{text}; {OWN}: use laconic.distribute for these")
    if isinstance(mode, Sync) and mode.drop_slowest:
        raise BadInput(f"elastic has an argument of its own for this: drop_slowest={mode.drop_slowest}, not '{mode}'")
    if isinstance(mode, BlockMode):
        if mode.state == "average":
            text = f"'{mode.name}' with state=keep or state=forget"
            raise BadInput(f"elastic does not send the optimiser's state: {text}")
        if mode.delay:
            text = f"elastic commits a block when all have its mean, and does not train on meanwhile as '{mode}' would"
            raise BadInput(f"{text}: give delay=0, or use laconic.distribute")
    if isinstance(mode, BlockMomentum) and mode.nesterov:
        raise BadInput("elastic has block_momentum without nesterov")
    if isinstance(mode, Robust) and workers is not None:
        mode.check_workers(workers)
    return mode


def parts_of(
    way: Way, codec: Codec, replica: Replica, options: ElasticOptions
) -> tuple[StepWork, Collected | Exchanged]:
    """Build what a worker does between two agreements, and the wire for its vectors."""
    if isinstance(way, BlockMode) and (way.fragments > 1 or way.mix):
        return _in_fragments(way, codec, replica, options)
    work: StepWork = (
        BlockWork(replica, way, relative=not codec.exact) if isinstance(way, BlockMode) else StepWork(replica)
    )
    rule = ruled(way) if isinstance(way, Robust) else None
    if rule is None and not options.leaves_out:
        return work, Exchanged(codec, replica.coded_numel, replica.numel, options.algorithm, way.feedback_decay)
    if codec.exact:
        return work, Exact(replica.numel, rule or weighted_mean, believes=rule is None)
    return work, Coded(codec, replica.coded_numel, replica.numel, rule)


def _in_fragments(
    way: BlockMode, codec: Codec, replica: Replica, options: ElasticOptions
) -> tuple[FragmentWork, ByFragment]:
    if options.leaves_out:
        text = f"drop_slowest and quorum leave out a worker's whole block, and by '{way}' blocks hang together"
        raise BadInput(f"{text}: leave these out, or fragments and mix")
    work = FragmentWork(replica, way, relative=not codec.exact)
    work.wire = ByFragment(codec, replica.coded_numel, work.parts, options.algorithm, way.feedback_decay)
    return work, work.wire


def terms_of(way: Way, codec: Codec, options: ElasticOptions) -> str:
    """List what all members must share besides model, optimiser and data; defaults are left out."""
    terms = ("" if way == Sync() else f", by {way}") + ("" if codec.exact else f", through {codec}")
    terms += f", without the {options.drop_slowest} slowest" if options.drop_slowest else ""
    terms += f", with a quorum of {options.quorum}" if options.quorum else ""
    terms += f", shares by {options.shares}" if options.shares != "equal" else ""
    return terms + (f", exchanged by {options.algorithm}" if options.algorithm != "auto" else "")


def meeting_of(given: str | Path | None) -> str | Path:
    """Return the given meeting place, or the one that LACONIC_MEETING names; BadInput if these differ."""
    joined = os.environ.get(MEETING_VARIABLE)
    if given and joined and not _are_same(given, joined):
        places = f"the meeting place {_shown(joined)}, and the script {_shown(str(given))}"
        text = f"`laconic join` ({MEETING_VARIABLE}) names {places}"
        raise BadInput(f"{text}: leave out meeting= of laconic.elastic, or start the script without `laconic join`")
    found = given or joined
    if not found:
        cure = f"give meeting=, a folder or an address, or start the script by `laconic join` ({MEETING_VARIABLE})"
        raise BadInput(f"elastic needs a place where workers meet; {cure}")
    return found


def _are_same(one: str | Path, other: str | Path) -> bool:
    if "://" in str(one) or "://" in str(other):
        return str(one).rstrip("/") == str(other).rstrip("/")
    return Path(one).resolve() == Path(other).resolve()


def _shown(place: str) -> str:
    """A place without a password."""
    scheme, separator, rest = place.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else place


def ruled(way: Robust) -> Rule:
    """Apply a robust rule to all members that have samples, each with equal weight."""

    def combine(parts: Sequence[tuple[int, Tensor]], out: Tensor) -> None:
        out.copy_(way.combine(torch.stack([values for samples, values in parts if samples])))

    return combine


def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Samples,
    meeting: str | Path | None = None,
    *,
    codec: str | Codec | None = None,
    consistency: str | Mode = "sync",
    scheduler: LRScheduler | None = None,
    workers: int = 1,
    drop_slowest: int = 0,
    quorum: int = 0,
    grace_s: float = 0.0,
    shares: str = "equal",
    patience_s: float = 5.0,
    silence_s: float = 1.5,
    outage_s: float = 300.0,
    algorithm: str = "auto",
    connections: int | str | None = None,
    **unknown: Never,
) -> ElasticJob:
    """Train together with whoever meets in `meeting`, through every loss of a worker; blocks until this one is in.

    The first worker to join provides the model; all others receive weights, optimiser state, step and place in the
    data from a peer, whenever they join. A step is the mean gradient of `batch` samples whoever is there to compute
    them, and every sample of an epoch is in exactly one committed step.

    Cost of a step, or of a block: that of the all-reduce, 2·(P − 1)/P of a payload each way by most algorithms, and
    three small messages between each worker and the coordinator, which is the longest-standing one. With a robust rule
    or `drop_slowest`, or a quorum, the coordinator receives and sends P − 1 payloads, and every other worker one. A
    view change costs a text at the meeting place and a round of small messages; a newcomer loads
    the state before, in chunks from all.

    Args:
        model: parameters float32, bfloat16 or float16, on any device; all workers must build the same shapes.
        optimizer: of the model's parameters. `job.step()` steps it, not you.
        data: the samples of an epoch, of a step, and how many epochs.
        meeting: where the workers of this job meet: a folder that all can write to, `tcp://host:port/job` for a
            `laconic meet` there, or `etcd://host:2379/job`. None: LACONIC_MEETING, as `laconic join` sets it.
        scheduler: a learning-rate scheduler, stepped after every committed step.
        codec: a spec, through which gradients travel both ways, with error feedback; None: `DEFAULT_CODEC`. Biases,
            norms and parameters of fewer than 1,024 values stay float32. All workers go on with the same decoded mean.
        consistency: what workers agree on: "sync", the mean gradient of every step; "robust(krum, f=1)", what a rule
            makes of all gradients at the coordinator, which is trusted (`workers` must be enough for f); "local(8)",
            "block_momentum(8)" or "diloco(100)", the weights after a block of steps that each worker makes alone, which
            is then what is committed, or made again.
        workers, drop_slowest, quorum, grace_s, shares: see `ElasticOptions`, also for what follows.
        patience_s, silence_s, outage_s, algorithm, connections: how long to wait, and how vectors travel.
        unknown: always empty. An unknown name raises UnknownName and suggests the closest match.

    Raises:
        UnknownName: an option does not exist.
        BadInput: a value out of range, a codec or a mode that elastic does not have, the job in `meeting` trains
            something else, or `laconic join` names another place than `meeting`.
        PayloadError: from `step`: what the coordinator sent cannot be read.
        Mismatch: from `step`: a member is in another exchange than this one; a fault of the program, not of a worker.
        PeerLost: every worker that had the model is gone.
        StorageError: a change of members could not be written to `meeting` for `outage_s`, and the model is in memory;
            or a newcomer could not read there for so long.

    >>> import tempfile
    >>> import torch
    >>> from torch import nn
    >>> import laconic
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> x = torch.ones(10, 4)
    >>> with laconic.elastic(model, optimizer, laconic.Samples(10, batch=5), tempfile.mkdtemp()) as job:
    ...     for batch in job.batches():
    ...         model(x[batch]).square().mean().backward()
    ...         _ = job.step()
    ...     job.steps
    2

    Source: Chen et al., Revisiting Distributed Synchronous SGD, 2016 (backup workers); Birman and Joseph, Exploiting
        virtual synchrony in distributed systems, SOSP 1987 (views).
    Differs: views are numbered at a meeting place, where each can be made once, not by a vote; gradients
        dropped by `drop_slowest` are computed again from the same samples later, not lost; blocks end with the epoch.
    """
    given = ElasticOptions.of({
        "workers": workers, "drop_slowest": drop_slowest, "quorum": quorum, "grace_s": grace_s, "shares": shares,
        "patience_s": patience_s, "silence_s": silence_s, "outage_s": outage_s, "algorithm": algorithm,
        "connections": connections, **unknown,
    })  # fmt: skip
    if codec == "auto":
        raise BadInput("codec 'auto' is chosen by links between ranks that stay; name a codec for elastic")
    way = way_for(consistency, given.workers)
    built = flat_codec((way.codec or DEFAULT_CODEC) if codec is None else codec)
    compile_planned([built])
    exempt, terms = None if built.exact else Exemptions(), terms_of(way, built, given)
    replica = Replica(model, optimizer, data.ledger(), scheduler, exempt=exempt, terms=terms)
    return ElasticJob(replica, parts_of(way, built, replica, given), Meeting(meeting_of(meeting)), given, data.epochs)
