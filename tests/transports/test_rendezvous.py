"""How a process finds its job, and what it says when it cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.errors import BadInput, CollectiveTimeout
from laconic.transports.launcher import LocalJob
from laconic.transports.rendezvous import find_place, new_store


def _launched(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_port_in_use_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        _launched(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(BadInput, match=rf"^\[rank 0/2\]: port {port} .* in use .*; choose another MASTER_PORT$"):
            find_place(30.0)


def test_the_rank_that_holds_the_store_can_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
    _launched(monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first, second = find_place(30.0), find_place(30.0)
    assert first.store is not None
    assert second.store is not None
    first.store.set("met", "once")
    assert second.store.get("met") == b"once"


def test_a_stranger_who_never_answers_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        _launched(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(CollectiveTimeout, match=rf"^\[rank 1/2\]: what listens at \S+:{port} has not answered"):
            find_place(0.5)


def test_an_incomplete_environment_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(BadInput, match="RANK is set but MASTER_PORT is not"):
        find_place(1.0)
    _launched(monkeypatch, MASTER_PORT="many")
    with pytest.raises(BadInput, match="must be whole numbers"):
        find_place(1.0)


SLURM_TASK = """
import torch
import torch.distributed as dist
import laconic

world = laconic.init()
dist.init_process_group("gloo")  # torch finds its own variables
ones = torch.ones(1)
dist.all_reduce(ones)
print(world.rank, world.world_size, laconic.all_reduce(torch.tensor([1.0 + world.rank])).item(), ones.item())
world.close()
print(laconic.init().world_size)
"""


@pytest.mark.processes
def test_tasks_of_srun_meet_as_slurm_has_numbered_them(tmp_path: Path) -> None:
    """With the variables that srun sets, for a step of two tasks on one host."""
    (tmp_path / "task.py").write_text(SLURM_TASK)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
    job = str(os.getpid())  # so that steps of tests that run at the same time have ports of their own
    tasks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "task.py")], stdout=subprocess.PIPE, text=True,
            env={**kept, "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0",
                 "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost,other[1-3]"},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=90)[0].split() for task in tasks]
    assert said == [["0", "2", "3.0", "2.0", "2"], ["1", "2", "3.0", "2.0", "2"]]


@pytest.mark.processes
def test_nodes_of_skypilot_meet_at_the_first(tmp_path: Path) -> None:
    """With the variables that SkyPilot sets on each node of a task that runs `python train.py`."""
    (tmp_path / "task.py").write_text(SLURM_TASK)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
    port = str(20000 + 2 * (os.getpid() % 5000) + 1)  # SkyPilot's nodes have networks of their own; tests share one
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "MASTER_PORT": port}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "task.py")], stdout=subprocess.PIPE, text=True,
            env={**kept, **nodes, "SKYPILOT_NODE_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=90)[0].split() for task in tasks]
    assert said == [["0", "2", "3.0", "2.0", "2"], ["1", "2", "3.0", "2.0", "2"]]


def test_half_an_environment_is_refused_and_not_trained_alone_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    _launched(monkeypatch, WORLD_SIZE="4")
    with pytest.raises(BadInput, match="WORLD_SIZE is set but RANK is not; start with torchrun, or unset WORLD_SIZE"):
        find_place(1.0)
    _launched(monkeypatch, RANK="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with pytest.raises(BadInput, match="numbered from 0 to WORLD_SIZE - 1"):
        find_place(1.0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    _launched(monkeypatch, SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_IPS=" ")
    with pytest.raises(BadInput, match="SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK is not"):
        find_place(1.0)


def test_half_an_environment_of_slurm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    _launched(monkeypatch, SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_JOB_ID="7")
    with pytest.raises(BadInput, match="SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS is not; start each task by srun"):
        find_place(1.0)
    _launched(monkeypatch, SLURM_STEP_NODELIST="a", SLURM_STEP_NUM_TASKS="two")
    with pytest.raises(BadInput, match="must be whole numbers"):
        find_place(1.0)


def _store_of_a_job() -> dist.TCPStore:
    job = LocalJob(1, os.getpid)
    job.results(60)
    return job.store


@pytest.mark.processes
@pytest.mark.parametrize("make", [new_store, _store_of_a_job])
def test_a_local_store_is_reached_from_this_machine_alone(make: Callable[[], dist.TCPStore]) -> None:
    """torch's own listens on all interfaces."""
    store = make()
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    listening = [each[1] for each in lines if each[3] == "0A" and int(each[1].rpartition(":")[2], 16) == store.port]
    assert listening == [f"0100007F:{store.port:04X}"]
    dist.TCPStore("127.0.0.1", store.port, is_master=False).set("a", "b")
    assert store.get("a") == b"b"
