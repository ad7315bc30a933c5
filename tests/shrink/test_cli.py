"""`laconic shrink` and `laconic inspect`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic
from laconic.cli import main


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert ended.value.code in (0, None), said.err
    return said.out


def test_a_file_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(80, 60), nn.Linear(60, 5))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    out = tmp_path / "a.lac"
    table = _run(capsys, "shrink", tmp_path / "a.pt", "-o", out, "--density", 0.2, "--bits", 3)
    assert "index bits" in table
    found = json.loads(_run(capsys, "inspect", out, "--json"))
    assert found["file_nbytes"] == out.stat().st_size
    assert found["dense_nbytes"] == 4 * sum(p.numel() for p in model.parameters())
    assert abs(found["density"] - 0.2) < 0.01
    assert len(laconic.load_shrunk(out)["0.weight"].unique()) <= 9
    _run(capsys, "shrink", tmp_path / "a.pt", "-o", out, "--share", "none")
    assert torch.equal(laconic.load_shrunk(out)["1.weight"], model[1].weight)


def test_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--density", 0.2, "--bits", 4, "--budget", 0.2, "--epochs", 1, "--rounds", 1, "--json")
    found = json.loads(_run(capsys, "shrink", "digits-mlp", "-o", tmp_path / "a.lac", *words))
    assert found["reduction_factor"] > 15
    assert found["about"]["error"] < 0.3


def test_a_budget_that_nothing_meets_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest is told; what was trained is kept in the folder, and is not trained again."""
    words = ["shrink", "digits-mlp", "-o", tmp_path / "a.lac", "--density", 0.01, "--bits", 1, "--epochs", 1]
    words += ["--rounds", 1, "--folder", tmp_path / "kept"]
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert "the error rose by 0." in said
        assert not (tmp_path / "a.lac").exists()
    assert "retrained" not in said
    kept = sorted(path.name.partition("-")[0] for path in (tmp_path / "kept").iterdir())
    assert kept == ["pruned", "shared", "trained.state"]


@pytest.mark.parametrize("name", ["none.pt", "junk.pt", "list.pt", "none.lac", "junk.safetensors"])
def test_bad_files_end_in_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if name.startswith("junk"):
        path.write_bytes(b"not weights at all")
    if name.startswith("list"):
        torch.save([1, 2], path)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path)] if path.suffix == ".lac" else ["shrink", str(path), "-o", str(tmp_path / "x.lac")])
    assert ended.value.code == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "x.lac").exists()


def test_weights_alone_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "a.pt")
    with pytest.raises(SystemExit) as ended:
        main(["shrink", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.lac"), "--budget", "0.01"])
    assert ended.value.code == 2
    assert "--budget" in capsys.readouterr().err
    assert not (tmp_path / "a.lac").exists()
