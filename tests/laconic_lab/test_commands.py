"""train, compare and demo as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.transports.mpi_launcher import find_mpiexec
from laconic_lab.commands.compare import DEMO_CONFIGS
from laconic_lab.runs.spec import split


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "digits-mpl"], "did you mean 'digits-mlp'"),
        (["train"], "name a workload (cifar-cnn"),
        (["train", "digits-mlp", "--codec", "dynamic9"], "did you mean 'dynamic8'"),
        (["train", "digits-mlp", "--codec", "ddp"], "for `laconic compare`"),
        (["train", "digits-mlp", "--algorithm", "rign"], "did you mean 'ring'"),
        (["train", "digits-mlp", "--consistency", "eventual"], "valid ones: "),
        (["train", "digits-mlp", "-n", "0"], "between 1 and 256"),
        (["train", "digits-mlp", "--epochs", "0"], "at least 1"),
        (["train", "--resume", "nowhere"], "no run at nowhere"),
        (["train", "--resume", "nowhere", "--epochs", "3", "-n", "2"], "it takes no --workers, --epochs"),
        (["compare", "--resume", "nowhere", "--seeds", "5"], "it takes no --seeds"),
        (["search", "--resume", "nowhere", "--method", "tpe"], "it takes no --method"),
        (["train", "digits-mlp", "--learning-rate", "0"], "--learning-rate must be above 0"),
        (["train", "digits-mlp", "--batch", "0"], "--batch must be at least 1"),
        (["train", "digits-mlp", "--algorithm", "ring", "--consistency", "local(8)"], "chooses its own"),
        (["train", "digits-mlp", "--algorithm", "ring", "--codec", "auto"], "chooses its own"),
        (["train", "digits-mlp", "--algorithm", "ring", "--divide", "stages(micro=2)"], "sends activations"),
        (["train", "--plan", "plan.json", "--batch", "8"], "it takes no --batch"),
        (["compare", "digits-mlp", "--configs", "ddp", "--consistency", "local(8)"], "none of ddp leaves it open"),
        (["compare", "digits-mlp", "--divide", "stages(micro=2)", "--consistency", "async"], "leaves it open"),
        (["compare", "digits-mlp", "--configs", "divide:none@stages(micro=2),feedback=false"], "options go with"),
        (["compare", "--resume", "nowhere"], "no run at nowhere"),
        (["compare"], "name a workload"),
        (["compare", "digits-mlp", "--configs", ","], "no configuration is named"),
        (["compare", "digits-mlp", "--configs", "ddp,ddp"], "named twice"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_compare_prints_the_json_it_promises(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["compare", "digits-mlp", "-n", "2", "--configs", "ddp,dynamic8,distribute:dynamic8"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--seeds", "2", "--epochs", "2", "--runs", str(tmp_path), "--json"])
    assert ended.value.code == 0
    body = json.loads(capsys.readouterr().out)
    assert set(body) == {"results", "lint", "report"}
    assert [row["config"] for row in body["results"]] == ["ddp", "compress:dynamic8", "distribute:dynamic8"]
    for row in body["results"]:
        assert set(row) == {
            "config", "seeds", "test_accuracy", "loss", "seconds_to_target", "step_seconds_median",
            "sent_nbytes_per_step", "wire_seconds_per_step",
        }  # fmt: skip
        assert row["seeds"] == [0, 1]
        assert all(0.5 < accuracy <= 1 for accuracy in row["test_accuracy"])
    ddp, *ours = body["results"]
    assert ddp["wire_seconds_per_step"] is None
    for row in ours:
        assert row["wire_seconds_per_step"] > 0
        assert ddp["sent_nbytes_per_step"] > 3.8 * row["sent_nbytes_per_step"]
    assert {"rule", "title", "verdict", "evidence"} == set(body["lint"][0])
    assert Path(body["report"]).exists()


@pytest.mark.processes
@pytest.mark.slow
def test_train_joins_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "laconic"]
    command += ["train", "digits-mlp", "--codec", "dynamic8", "--epochs", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["results"][0]["config"] == "compress:dynamic8"
    (run,) = (tmp_path / "runs").glob("2*")
    assert json.loads((run / "run.json").read_text())["configurations"][0]["workers"] == 2


@pytest.mark.processes
@pytest.mark.alone
def test_train_joins_mpiexec_and_ends_with_the_weights_of_local_workers(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words = ["train", "digits-mlp", "--codec", "distribute:dynamic8", "--epochs", "2", "--json"]
    launched = [find_mpiexec(), "-n", "2", sys.executable, "-m", "laconic", *words]
    local = [sys.executable, "-m", "laconic", *words, "-n", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = []
    for folder, command in (("mpi", launched), ("local", local)):
        done = subprocess.run(
            [*command, "--runs", str(tmp_path / folder)], capture_output=True, text=True, timeout=110, env=environment
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))  # one rank prints, the others are silent
    assert said[0]["weights_sha256"] == said[1]["weights_sha256"]
    (run,) = (tmp_path / "mpi").glob("2*")
    (chosen,) = json.loads((run / "run.json").read_text())["configurations"]
    assert (chosen["workers"], chosen["engine"]) == (2, "mpi")


@pytest.mark.processes
@pytest.mark.slow
def test_demo_ends_with_a_table_and_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "-n", "2", "--seeds", "1", "--epochs", "2", "--runs", str(tmp_path)])
    said = capsys.readouterr()
    assert ended.value.code == 0
    assert "emulated hosts" in said.err or "loopback" in said.err
    *_, report, gained, following = said.out.strip().splitlines()
    assert gained.startswith("gained: ")
    assert "laconic.compress" in following
    assert Path(report.removeprefix("report: ")).exists()
    for name in split(DEMO_CONFIGS):
        assert any(line.startswith(name + " ") for line in said.out.splitlines())
