"""Metrics to files and dashboards, and `laconic watch`, which shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.cli import main
from laconic.cli.watch import Followed
from laconic.errors import BadInput
from laconic.exchange.job import BucketRecord, step_metrics
from laconic.exchange.residuals import Residuals
from laconic.integrations.loggers import JsonLines, MetricsLog, MLflow, TensorBoard, WeightsAndBiases
from laconic.transports.launcher import run_local

LISTED = {
    "step", "codec", "dense_nbytes", "sent_nbytes", "messages", "encode_s", "decode_s", "wire_s", "wait_s", "hidden_s",
    "busy_s", "exchange_s", "residual_norm",
}  # fmt: skip


def _trained(door: str, path: str) -> tuple[dict[str, Any], list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    torch.distributed.init_process_group("gloo")
    made = torch.nn.parallel.DistributedDataParallel(model) if door == "compress" else model
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    if door == "compress":
        job: Any = laconic.compress(made, "topk(0.05)")
    else:
        job = laconic.distribute(made, optimizer, codec="topk(0.05)")
    log = JsonLines(path, every=4)
    for _ in range(12):
        optimizer.zero_grad()
        loss = made(torch.randn(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        log(job, loss=loss.item())
    job.finish()
    found, residuals = job.metrics(), job.state_dict()["residuals"]
    job.close()
    laconic.init().close()
    torch.distributed.destroy_process_group()
    return found, [float(value.square().sum()) for value in residuals.values()]


@pytest.mark.processes
@pytest.mark.parametrize("door", ["compress", "distribute"])
def test_every_listed_metric_is_watched(door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    found, _ = run_local(2, _trained, (door, str(path)), timeout_s=60)[0]
    assert found.keys() >= LISTED | {"compression_error"}
    assert {f"{name}_median" for name in ("sent_nbytes", "wire_s", "hidden_s", "wait_s")} <= found.keys()
    # topk(0.05) leaves 95 % of the values out: those of some randn-like tensor hold most of the square.
    assert 0.3 < found["compression_error"] < 1
    assert 0 <= found["hidden_s"] <= found["busy_s"] <= found["exchange_s"] + 1e-9
    assert found["residual_norm"] > 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]  # by rank 0 alone
    assert lines[-1]["laconic/sent_nbytes"] == found["sent_nbytes"]
    main_exit(["watch", str(path), "--once"])
    shown = " ".join(capsys.readouterr().out.split())  # the path may be longer than a line
    assert "step 12" in shown
    assert "fewer bytes than float32" in shown
    main_exit(["watch", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["last"]["loss"] == lines[-1]["loss"]


def _logged(folder: str) -> None:
    """What the ranks of `distribute` write when torch.distributed is not initialised, in groups of one as well."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with laconic.init() as world, world.split([0, 1]) as alone:
        for name, own in (("together", world), ("apart", alone)):
            log = JsonLines(Path(folder) / name, every=1)
            with laconic.distribute(model, optimizer, world=own) as job:
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                log(job, rank=world.rank)


@pytest.mark.processes
def test_rank_0_writes_where_torch_distributed_is_not_initialised(tmp_path: Path) -> None:
    run_local(2, _logged, (str(tmp_path),), timeout_s=60)
    for name in ("together", "apart"):
        assert [json.loads(line)["rank"] for line in (tmp_path / name).read_text().splitlines()] == [0], name


def main_exit(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code in (0, None)


def test_the_norm_is_that_of_what_is_still_to_be_sent() -> None:
    residuals, room = Residuals(), torch.empty(99, dtype=torch.uint8)
    residuals.encode("weights", laconic.codec("topk(0.5)"), torch.tensor([3.0, 9.0]), step=0, out=room)
    residuals.load_state_dict({**residuals.state_dict(), "other": torch.tensor([4.0])})
    assert residuals.norm() == 5.0


def test_hidden_is_what_came_before_the_last_gradient() -> None:
    def record(begun: float, made: float) -> BucketRecord:
        return BucketRecord(0, int(begun), 10, "none", "direct", 2.0, 0.25, 0.5, 0.25, 40, 1, made=made, begun=begun)

    found = step_metrics([record(0.0, 0.0), record(1.0, 1.0), record(5.0, 4.0)], 2)
    assert (found["busy_s"], found["hidden_s"], found["wire_s"]) == (5.0, 3.0, 4.5)


def test_lines_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\nnot json\n{"step": 2, "lo')
    followed = Followed(path)
    assert (followed.read(), followed.bad) == (1, 1)
    with path.open("ab") as file:
        file.write(b'ss": NaN}\n{"step": 3, "loss": 0.5}\n\xff\n')
    followed.read()
    assert followed.last["step"] == 3
    assert followed.history["loss"][-1] == 0.5
    with pytest.raises(BadInput, match="JsonLines"):
        Followed(tmp_path / "nothing")


class _Job:
    """A job as far as a log looks at it."""

    def metrics(self) -> dict[str, float | str]:
        return {"step": 7, "codec": "dynamic8", "sent_nbytes": 100}


def test_nan_is_written_so_that_it_can_be_read(tmp_path: Path) -> None:
    JsonLines(tmp_path / "a.jsonl", every=1)(_Job(), loss=float("nan"))  # type: ignore[arg-type]
    followed = Followed(tmp_path / "a.jsonl")
    assert (followed.read(), followed.last["loss"]) == (1, "nan")
    with pytest.raises(BadInput, match="every"):
        JsonLines(tmp_path / "a.jsonl", every=0)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoard(tmp_path, every=1)
    log(_Job(), loss=0.5)  # type: ignore[arg-type]
    log.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert read.Scalars("laconic/sent_nbytes")[0].value == 100
    assert read.Scalars("loss")[0].value == 0.5


def test_weights_and_biases(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    with pytest.raises(BadInput, match=r"wandb\.init"):
        WeightsAndBiases(every=1)(_Job())  # type: ignore[arg-type]
    run = wandb.init(mode="offline", dir=tmp_path, project="laconic")
    log: MetricsLog = WeightsAndBiases(every=1)
    log(_Job(), loss=0.5)  # type: ignore[arg-type]
    run.finish()
    assert "laconic/sent_nbytes 100" in capfd.readouterr().err  # its own summary of the run


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        MLflow(every=1)(_Job(), loss=0.5)  # type: ignore[arg-type]
    assert mlflow.get_run(run.info.run_id).data.metrics["laconic/sent_nbytes"] == 100
