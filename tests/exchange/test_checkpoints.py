"""Checkpoints: killed anywhere, cut off or flipped, training goes on from the last good one, to the bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput, CheckpointError, LaconicError, StorageError
from laconic.exchange import checkpoints as exchange_module
from laconic.exchange.checkpoints import Checkpoints, Cursor
from laconic.exchange.ddp import hook
from laconic.exchange.job import Job
from laconic.exchange.state import CompressionState
from laconic.storage import checkpoints as module
from laconic.storage.tree import read_file, write_file
from laconic.transports.launcher import run_local
from tests.exchange import checkpoint_lives
from tests.full_disk import files_of_at_most

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lives", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_points_it_resumes_from_a_good_state_with_the_same_data(lives: int, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(checkpoint_lives.__file__)), str(tmp_path), str(lives), "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, env=environment)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    last = max(int(words[1]) for words in told)
    life = checkpoint_lives.Life()
    digests, rows = [life.digest()], [""]
    for _ in range(last):
        rows.append("-".join(map(str, life.step().tolist())))
        digests.append(life.digest())
    acknowledged = begun = 0
    resumed = [words for words in told if words[0] == "resumed"]
    for words in told:
        step = int(words[1])
        if words[0] == "resumed":
            assert acknowledged <= step <= begun, "nothing that was known to be written is lost"
            assert words[2] == digests[step], f"the state of step {step} is not the one that was saved"
        elif words[0] == "step":
            assert words[2] == rows[step], f"step {step} read other data"
            assert words[3] == digests[step]
            begun = max(begun, step)
        else:
            acknowledged = step
    assert len(resumed) > lives / 2
    assert len({words[1] for words in resumed}) > 5, "it went on between the kills"


class _Training:
    """A small training with every kind of state, alone."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.cursor = Cursor(20, batch=4, seed=3)
        self.checkpoints = Checkpoints(folder, **options)
        self.x = torch.randn(20, 6)
        self.done = 0

    def train(self, steps: int, *, saves: bool = True) -> torch.Tensor:
        for _ in range(steps):
            self.optimizer.zero_grad()
            noise = random.random() + float(np.random.rand())  # noqa: NPY002
            (noise * self.model(self.x[next(self.cursor)])).square().mean().backward()
            self.optimizer.step()
            self.done += 1
            if saves:
                self.checkpoints.save(self.done, model=self.model, optimizer=self.optimizer, cursor=self.cursor)
        self.checkpoints.wait()
        return torch.cat([value.reshape(-1).double() for value in self.model.state_dict().values()])

    def restore(self) -> int:
        found = self.checkpoints.restore(model=self.model, optimizer=self.optimizer, cursor=self.cursor)
        self.done = 0 if found is None else found.step
        return self.done


def test_what_is_restored_goes_on_to_the_bit(tmp_path: Path) -> None:
    first = _Training(tmp_path)
    assert first.checkpoints.latest() is None
    assert first.restore() == 0
    first.train(4)
    expected = first.train(6, saves=False)
    again = _Training(tmp_path)
    random.seed(99)
    assert again.restore() == 4
    assert torch.equal(again.train(6, saves=False), expected)


def test_three_are_kept_and_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".rank0.left").write_bytes(b"half")
    (tmp_path / ".rank1.left").write_bytes(b"another worker's")
    training = _Training(tmp_path)
    training.train(5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".rank1.left", *(f"step00000000{step}-rank0.ckpt" for step in (3, 4, 5))]
    _Training(tmp_path, keep=1).train(1)  # from the beginning, beside files of a later time
    assert (tmp_path / "step000000001-rank0.ckpt").exists()


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "other"])
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_gives_way_to_the_one_before(tmp_path: Path, harm: str, seed: int) -> None:
    training = _Training(tmp_path)
    training.train(3)
    path, chance = tmp_path / "step000000003-rank0.ckpt", random.Random(seed)
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    flipped = bytearray(data)
    flipped[place] ^= 1 << chance.randrange(8)
    path.write_bytes({"cut": data[:place], "flip": flipped, "empty": b"", "other": b"PK\x03\x04 something else"}[harm])
    again = _Training(tmp_path)
    with pytest.warns(UserWarning, match=r"step000000003-rank0\.ckpt.*taking a checkpoint before it"):
        assert again.restore() == 2
    assert not path.exists(), "a future that was given up"
    again.train(1)
    assert _Training(tmp_path).restore() == 3


def test_when_none_is_good_it_says_so(tmp_path: Path) -> None:
    training = _Training(tmp_path)
    training.train(2)
    for path in tmp_path.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="cut off"), pytest.raises(CheckpointError, match="of 2 files 2 are cut off"):
        _Training(tmp_path).restore()


def test_a_snapshot_is_of_the_moment_of_save_and_written_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, gate, write = _Training(tmp_path), threading.Event(), module.write_file
    names = []

    def slow(*args: Any, **options: Any) -> None:
        names.append(threading.current_thread().name)
        assert gate.wait(30)
        write(*args, **options)

    monkeypatch.setattr(module, "write_file", slow)
    before = training.model[0].weight.detach().clone()
    extra = {"curve": [1.0, torch.tensor(2.0)], "note": None}
    training.checkpoints.save(1, model=training.model, optimizer=training.optimizer, extra=extra)
    assert not list(tmp_path.glob("*.ckpt")), "save returned before it was written"
    with torch.no_grad():
        training.model[0].weight.add_(1)
    gate.set()
    found = training.checkpoints.restore(model=training.model)
    assert names == ["laconic-checkpoint"]
    assert found is not None
    assert found.extra == extra
    assert torch.equal(training.model[0].weight, before)
    training.checkpoints.close()
    assert "laconic-checkpoint" not in [thread.name for thread in threading.enumerate()]


def test_an_error_of_the_writing_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = _Training(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    training.checkpoints.save(1, model=training.model)
    with pytest.raises(OSError, match="No space left"):
        training.checkpoints.save(2, model=training.model)
    training.checkpoints.close()


def test_a_write_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(exchange_module, "WRITING_S", 0.05)
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints.files, "write", lambda *_: stuck.wait(30))
    checkpoints.save(1, model=nn.Linear(2, 1))
    with pytest.raises(StorageError, match="still being written after"):
        checkpoints.save(2, model=nn.Linear(2, 1))
    stuck.set()
    checkpoints.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_is_restored(tmp_path: Path, asynchronous: bool) -> None:
    training = _Training(tmp_path)
    training.train(1)
    with Checkpoints(tmp_path, asynchronous=asynchronous) as checkpoints:
        size = (tmp_path / "step000000001-rank0.ckpt").stat().st_size
        says = r"step000000002-rank0.ckpt cannot be written: File too large; .*; the checkpoint of step 1 is intact"


        def save() -> None:
            checkpoints.save(2, model=training.model, optimizer=training.optimizer)
            checkpoints.wait()

        with pytest.raises(StorageError, match=says), files_of_at_most(size // 2):
            save()
        assert checkpoints.latest() == 1
        save()
        assert checkpoints.latest() == 2
    with pytest.raises(StorageError, match="cannot be written"):
        Checkpoints(tmp_path / "step000000001-rank0.ckpt" / "folder")


def test_bad_input_gets_one_sentence(tmp_path: Path) -> None:
    training = _Training(tmp_path)
    with pytest.raises(BadInput, match="keep is a number of checkpoints"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(BadInput, match="step is a whole number"):
        training.checkpoints.save(-1)
    with pytest.raises(BadInput, match="saved state cannot hold a set"):
        training.checkpoints.save(1, extra={1, 2})
    training.checkpoints.save(1, model=training.model)
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        training.checkpoints.restore(optimizer=training.optimizer)


@pytest.mark.parametrize(
    ("part", "forged"),
    [
        ("model", {"0.weight": torch.zeros(3)}),
        ("model", {"0.weight": None}),
        ("model", "weights"),
        ("optimizer", {"state": {}, "param_groups": []}),
        ("optimizer", "x"),
        ("cursor", [1]),
        ("random", {"torch": 3}),
    ],
)
def test_what_does_not_fit_under_a_valid_checksum_is_one_error_that_names_the_file(
    part: str, forged: Any, tmp_path: Path
) -> None:
    training = _Training(tmp_path)
    training.train(1)
    path = training.checkpoints.files.path(1)
    kept = read_file(path)
    kept[part] = {**kept[part], **forged} if part == "model" and isinstance(forged, dict) else forged
    write_file(path, kept)
    with pytest.raises(LaconicError, match=r"step000000001-rank0\.ckpt|cursor") as caught:
        training.restore()
    assert "\n" not in str(caught.value)


def test_a_cursor_reads_every_sample_once_an_epoch_and_refuses_other_data() -> None:
    cursor = Cursor(12, batch=4, seed=5)
    epochs = [torch.cat([next(cursor) for _ in range(3)]) for _ in range(2)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(12))
    assert not torch.equal(*epochs)
    with pytest.raises(BadInput, match="saved in 12 samples by seed 5; this one reads 13"):
        Cursor(13, batch=4, seed=5).load_state_dict(cursor.state_dict())
    with pytest.raises(BadInput, match="at least one sample"):
        Cursor(12, batch=0)


def _rank_1_has_none(world: laconic.World, folder: Path, saves: int) -> Any:
    """What the workers meet when rank 0 has saved so often and rank 1 never."""
    checkpoints = Checkpoints(folder, asynchronous=False)
    for step in range(saves if world.rank == 0 else 0):
        checkpoints.save(step)
    laconic.barrier()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return checkpoints.latest(), *(str(each.message) for each in warned)
        except CheckpointError as error:
            return str(error)


def _together(folder: str) -> dict[str, Any]:
    """Two ranks: train 5 steps on, from the newest checkpoint that both have; then once more after damage."""
    found: dict[str, Any] = {}
    with laconic.init(timeout_s=60) as world:
        for attempt in ("first", "whole", "damaged"):
            torch.manual_seed(world.rank)
            model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            job = laconic.distribute(model, optimizer, codec="topk(0.05)")
            cursor, x = Cursor(30, batch=6), torch.randn(30, 40, generator=torch.Generator().manual_seed(7))
            with Checkpoints(folder, asynchronous=attempt != "damaged") as checkpoints:
                if attempt == "damaged" and world.rank == 1:
                    path = Path(folder) / "step000000004-rank1.ckpt"
                    path.write_bytes(path.read_bytes()[:-3])
                laconic.barrier()
                if attempt == "damaged" and world.rank == 1:
                    with pytest.warns(UserWarning, match="rank1"):
                        restored = checkpoints.restore(model=model, optimizer=optimizer, cursor=cursor)
                else:
                    restored = checkpoints.restore(model=model, optimizer=optimizer, cursor=cursor)
                step = 0 if restored is None else restored.step
                found[attempt, "from"] = step
                while step < 6:
                    optimizer.zero_grad()
                    model(x[next(cursor)]).square().mean().backward()
                    optimizer.step()
                    step += 1
                    if attempt == "first" and step <= 4:
                        checkpoints.save(step, model=model, optimizer=optimizer, cursor=cursor)
                found[attempt, "residuals"] = optimizer.state_dict()["laconic"]["residuals"]
                found[attempt, "weights"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            job.close()
        found["early"] = _rank_1_has_none(world, Path(folder) / "early", 1)
        found["lost"] = _rank_1_has_none(world, Path(folder) / "lost", 4)
    return found


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_ranks_go_on_from_a_step_that_all_have_with_the_residuals_of_each(tmp_path: Path) -> None:
    ranks = run_local(2, _together, (str(tmp_path),), timeout_s=200)
    for found in ranks:
        assert [found[attempt, "from"] for attempt in ("first", "whole", "damaged")] == [0, 4, 3]
        for attempt in ("whole", "damaged"):
            assert torch.equal(found[attempt, "weights"], found["first", "weights"])
            for name, value in found["first", "residuals"].items():
                assert torch.equal(found[attempt, "residuals"][name], value)
                assert value.any()
        assert found["early"][0] is None
        assert "before worker 1 had written its first checkpoint" in found["early"][1]
        assert "no checkpoint is whole on all 2 workers; of 3 files 0 are cut off" in found["lost"]
    with pytest.raises(CheckpointError, match="made by 2 workers, this job has 1"):
        Checkpoints(tmp_path).restore()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_torchrun_restarts_and_training_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    def run(folder: Path, *options: str) -> str:
        folder.mkdir()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2",
            "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(ROOT / "examples" / "restart_torchrun.py"),
            *options,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    quiet, killed = run(tmp_path / "quiet"), run(tmp_path / "killed", "--die-at", "70")
    assert "resumed" not in quiet
    assert "resumed at step 60" in killed
    end = [line for line in quiet.splitlines() if line.startswith("weights")]
    assert end
    assert end == [line for line in killed.splitlines() if line.startswith("weights")]


def test_random_states_of_gpus_that_are_not_here() -> None:
    """More than there are is one sentence, fewer are fine; a job that goes on without any is warned."""
    module.check_gpus(0, 0)
    module.check_gpus(1, 4)
    with pytest.raises(CheckpointError, match="random states of 4 GPUs, and 1 is here: make as many visible"):
        module.check_gpus(4, 1)
    state = module.random_state()
    before = torch.get_rng_state()
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="of 2 GPUs, and none is here"):
            module.set_random_state({**state, "cuda": [before, before]})
        assert torch.equal(torch.get_rng_state(), before)


def _ddp_resumed(folder: str, how: str) -> tuple[bool, bool]:
    """Whether a compressed DDP training went on to the bit, and whether its job had residuals to restore."""
    dist.init_process_group("gloo")
    world = laconic.init(timeout_s=60)

    def made() -> Any:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))
        if how == "by hand":
            job = CompressionState("topk(0.05)", ddp.module.named_parameters())
            ddp.register_comm_hook(job, hook)
        else:
            job = laconic.compress(ddp, "topk(0.05)")
        return ddp, torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9), job

    def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            draw = torch.Generator().manual_seed(10 * step + world.rank)
            optimizer.zero_grad()
            ddp(torch.randn(8, 64, generator=draw)).square().mean().backward()
            optimizer.step()

    def saved_as(ddp: Any, job: Job) -> dict[str, Any]:
        return {"model": ddp.module if how == "module" else ddp, "job": job if how == "by hand" else None}

    with Checkpoints(folder) as checkpoints:
        ddp, optimizer, job = made()
        train(ddp, optimizer, range(3))
        checkpoints.save(3, optimizer=optimizer, **saved_as(ddp, job))
        has_residuals = any(bool(value.any()) for value in job.state_dict()["residuals"].values())
        train(ddp, optimizer, range(3, 6))
        job.close()
        again, optimizer, job = made()
        found = checkpoints.restore(optimizer=optimizer, **saved_as(again, job))
        assert found is not None
        train(again, optimizer, range(3, 6))
        same = all(torch.equal(a, b) for a, b in zip(ddp.parameters(), again.parameters(), strict=True))
        job.close()
    world.close()
    dist.destroy_process_group()
    return same, has_residuals


@pytest.mark.processes
@pytest.mark.parametrize("how", ["ddp", "module", "by hand"])
def test_a_compressed_ddp_model_is_saved_with_its_residuals(tmp_path: Path, how: str) -> None:
    assert run_local(2, _ddp_resumed, args=(str(tmp_path), how), timeout_s=60) == [(True, True)] * 2


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    laconic.init().close()
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_residuals_that_only_one_side_has_are_warned_of(tmp_path: Path) -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 32))
    with Checkpoints(tmp_path / "plain") as plain, Checkpoints(tmp_path / "compressed") as compressed:
        plain.save(1, model=ddp)
        with laconic.compress(ddp, "topk(0.05)"):
            compressed.save(1, model=ddp)
            with pytest.warns(UserWarning, match="its residuals begin at zero, unless you load them yourself"):
                plain.restore(model=ddp)
        with pytest.warns(UserWarning, match="call compress before restore"):
            compressed.restore(model=ddp)
        both = nn.ModuleList([DistributedDataParallel(nn.Linear(64, 32)) for _ in range(2)])
        with laconic.compress(both[0]), laconic.compress(both[1]):
            plain.save(2, model=both)
            assert plain.restore(model=both) is not None
            with laconic.compress(ddp) as job, pytest.raises(CheckpointError, match=r"state of 2 jobs.* given has 1"):
                plain.restore(job=job)
