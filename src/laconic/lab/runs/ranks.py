"""What runs on one rank of a trial: signals, process groups, and the training that fits the configuration.

Callers: `workers.py`, in a process for each rank, or in this one under torchrun and mpiexec.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from laconic.consistency import build as build_mode
from laconic.errors import BadInput
from laconic.exchange.auto import GUESS
from laconic.lab.runs.free import FreeTraining
from laconic.lab.runs.spec import TrialSpec
from laconic.lab.runs.stopping import request_stop
from laconic.lab.runs.trainer import Ended, LockstepTraining, RankTraining, compute_repeatably
from laconic.transports.profile import Profile
from laconic.transports.world import World, init

TIMEOUT_S = 1800.0  # how long ranks may wait for one that evaluates; a dead one is noticed at once all the same


def run_rank(trial: TrialSpec) -> Ended:
    """Train on this rank, from the beginning or a checkpoint, to the end or to a request to stop."""
    _listen(trial)
    compute_repeatably()
    own_group = trial.configuration.kind in ("peer", "compress") and not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo")
    try:
        with init(timeout_s=TIMEOUT_S) as world:
            if world.world_size != trial.configuration.workers:
                raise BadInput(f"the run has {trial.configuration.workers} workers, this job {world.world_size}")
            world.profile = _known_link(trial, world)
            return _training(trial)(trial, world).run()
    finally:
        if own_group:
            dist.destroy_process_group()


def _training(trial: TrialSpec) -> type[RankTraining]:
    """Workers that need not keep step run freely in a comparison; a training keeps step, for its checkpoints' sake."""
    chosen = trial.configuration
    if trial.keeps or trial.folder is None or chosen.workers == 1 or not chosen.is_ours:
        return LockstepTraining
    return LockstepTraining if build_mode(chosen.consistency).lockstep else FreeTraining


def _known_link(trial: TrialSpec, world: World) -> Profile | None:
    """What is known of the link without measuring: a measurement could choose otherwise next time, with other bits.

    Codec "auto" measures for itself.
    """
    if trial.link_bps is None or trial.configuration.codec == "auto":
        return None
    return Profile(world.engine, world.world_size, replace(GUESS, s_per_byte=8 / trial.link_bps))


def _listen(trial: TrialSpec) -> None:
    """What Ctrl-C, and a SIGTERM to every process of a job, do to this rank.

    In a training SIGTERM is a request to stop, on whichever rank, and under torchrun so is Ctrl-C. All else is left to
    the command that started the ranks, and with which they end.
    """
    def ask(number: int, frame: object) -> None:
        if trial.folder is not None:
            request_stop(Path(trial.folder))

    if not trial.launched:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, ask if trial.keeps else signal.SIG_IGN)
    elif trial.keeps:
        signal.signal(signal.SIGINT, ask)
        signal.signal(signal.SIGTERM, ask)
