"""The one-sided forms of `async`, `hogwild` and `gossip`, under the mpiexec of the installed MPI."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import laconic
from laconic.consistency import build
from laconic.errors import BadInput, MissingExtra
from laconic.transports.base import Transport
from laconic.transports.mpi_launcher import find_mpiexec, run_mpi
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from tests.consistency import one_sided_program as program
from tests.consistency.least_squares import start


def _has_mpi() -> bool:
    try:
        find_mpiexec()
    except MissingExtra:
        return False
    return importlib.util.find_spec("mpi4py") is not None


needs_mpi = pytest.mark.skipif(not _has_mpi(), reason="mpi4py or mpiexec is not installed")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What one job of three ranks found."""
    return run_mpi(3, program.all_of_it, timeout_s=100)


@needs_mpi
@pytest.mark.processes
def test_workers_train_together_through_windows(found: dict[str, Any]) -> None:
    trained = found["train"]
    begun = float(np.linalg.norm(start() - 1))
    for spec, each in trained.items():
        assert each["alike"], f"{spec}: after finish() all hold one model"
        assert each["error"] < begun / 3, spec
        assert each["sent"] > 0
    assert max(each["staleness"] for each in trained.values()) > 0


@needs_mpi
@pytest.mark.processes
def test_no_addition_is_lost_and_a_checkpoint_holds_the_window(found: dict[str, Any]) -> None:
    counted = found["count"]
    assert counted["least"] == counted["most"] == counted["expected"]


@needs_mpi
@pytest.mark.processes
def test_pairs_keep_the_mean(found: dict[str, Any]) -> None:
    assert found["mix"] < 1e-4


@pytest.mark.parametrize("spec", ["async(rma=true)", "hogwild(rma=true)", "gossip(asynchronous=true, rma=true)"])
def test_other_engines_are_refused_in_one_sentence(spec: str) -> None:
    def work(transport: Transport) -> str:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(BadInput) as error:
            laconic.distribute(model, optimizer, consistency=spec, world=World(transport))
        return str(error.value)

    says = "with rma=true uses MPI windows: start the job by mpiexec; this world runs on engine 'threads'"
    for text in run_threads(2, work):
        assert text.endswith(says)


@pytest.mark.parametrize(
    ("spec", "says"),
    [("async(replicas=1, rma=true)", "no servers"), ("gossip(rma=true)", "goes with asynchronous=true")],
)
def test_wrong_combinations(spec: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        build(spec)


def test_a_window_takes_no_codec() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(BadInput, match="takes no codec: MPI adds float32 in a window"):
        laconic.distribute(
            model, torch.optim.SGD(model.parameters(), 0.1), consistency="async(rma=true)", codec="dynamic8"
        )
