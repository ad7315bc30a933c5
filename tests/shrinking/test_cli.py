"""`laconic shrink` and `laconic inspect`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic
from laconic.cli import main
from laconic.shrinking.training import TaskTraining


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
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(out), "--memory", "10KB"])
    assert ended.value.code == 2
    assert "would take 20660 bytes, more than 10000; allow more by most_nbytes, or --memory" in capsys.readouterr().err
    _run(capsys, "shrink", tmp_path / "a.pt", "-o", out, "--share", "none")
    assert torch.equal(laconic.load_shrunk(out)["1.weight"], model[1].weight)


def test_weights_are_pruned_and_kept_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = nn.Linear(40, 30).state_dict()
    torch.save(state, tmp_path / "a.pt")
    _run(capsys, "shrink", tmp_path / "a.pt", "-o", tmp_path / "a.lac", "--share", "none", "--density", 0.2)
    weight = laconic.load_shrunk(tmp_path / "a.lac")["weight"]
    assert weight.count_nonzero() == 240
    assert torch.equal(weight, state["weight"] * (weight != 0))
    with pytest.raises(SystemExit) as ended:  # rather than lose what cannot be had again
        main(["shrink", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.pt")])
    assert ended.value.code == 2
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["weight"], state["weight"])


@pytest.mark.parametrize(("words", "said"), [
    (("--epochs", "0"), "--epochs"), (("--share", "ternary", "--bits", "4"), "no bits"), (("--bits", "16"), "1 to 8"),
    (("--density", "0"), "density"), (("--budget", "-1"), "budget"), (("-o", "."), "folder"),
    (("-o", f"{__file__}/a"), "within a file"), (("--share", "kmean"), "kmeans, none, ternary"),
])  # fmt: skip
def test_bad_options_end_in_one_sentence(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is trained."""
    monkeypatch.setattr(TaskTraining, "__call__", lambda self, model: pytest.fail("trained"))
    with pytest.raises(SystemExit) as ended:
        main(["shrink", "digits-mlp", "-o", str(tmp_path / "a.lac"), *words])
    error = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert said in error
    assert not (tmp_path / "a.lac").exists()


def test_half_precision_is_only_coded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rather than left as it is without a word."""
    torch.save(nn.Linear(40, 30).bfloat16().state_dict(), tmp_path / "a.pt")
    with pytest.raises(SystemExit) as ended:
        main(["shrink", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.lac"), "--bits", "3"])
    assert ended.value.code == 2
    assert "'weight' is torch.bfloat16" in capsys.readouterr().err
    _run(capsys, "shrink", tmp_path / "a.pt", "-o", tmp_path / "a.lac", "--share", "none")


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
    assert kept == ["pruned", "shared", "trained"]


@pytest.mark.parametrize("name", ["none.pt", "junk.pt", "list.pt", "none.lac", "junk.safetensors", "keys.pt", "cut.pt",
                                  "empty.pt", "sparse.pt", "code.pt"])  # fmt: skip
def test_bad_files_end_in_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if name.startswith("junk"):
        path.write_bytes(b"not weights at all")
    saved = {"list.pt": [1, 2], "keys.pt": {0: torch.ones(2)}, "cut.pt": {"w": torch.ones(50, 50)},
             "sparse.pt": {"w": torch.eye(3).to_sparse()}, "code.pt": nn.Linear(2, 2)}  # fmt: skip
    if name in saved:
        torch.save(saved[name], path)
    if name.startswith("cut"):
        path.write_bytes(path.read_bytes()[:5000])
    if name.startswith("empty"):
        path.touch()
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path)] if path.suffix == ".lac" else ["shrink", str(path), "-o", str(tmp_path / "x.lac")])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert name in said or name == "sparse.pt"
    assert not said.rstrip().endswith(":")
    assert ("torch.save" in said) == (name in ("junk.pt", "cut.pt", "empty.pt", "code.pt"))
    assert "weights_only" not in said  # torch's advice to run what is in the file
    assert not (tmp_path / "x.lac").exists()


def test_an_entry_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": nn.Linear(9, 5).state_dict(), "epoch": 3}, tmp_path / "a.pt")
    words = ["shrink", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.lac")]
    for more, said in (([], "--key model"), (["--key", "modle"], "did you mean 'model'")):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    _run(capsys, *words, "--key", "model")
    assert sorted(laconic.load_shrunk(tmp_path / "a.lac")) == ["bias", "weight"]


@pytest.mark.parametrize("name", ["notes.txt", "digits-mlp.lac", "."])
def test_what_is_neither_weights_nor_a_workload(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SystemExit) as ended:
        main(["shrink", name, "-o", "a.lac"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{name} is neither a file of weights (.pt" in said
    assert ("did you mean 'digits-mlp'" in said) == name.startswith("digits")


@pytest.mark.parametrize(("more", "said"), [([], "--folder"), (["--folder", "kept"], "goes on from what kept keeps")])
def test_an_interruption_says_how_to_go_on(
    more: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: TaskTraining, model: nn.Module) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TaskTraining, "__call__", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["shrink", "digits-mlp", "-o", "a.lac", *more])
    assert ended.value.code == 130
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_names_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, too, where brackets could be markup."""
    torch.save({"[red]": torch.ones(2), "[/x]": torch.ones(2)}, tmp_path / "a.pt")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = _run(capsys, "shrink", tmp_path / "a.pt", "-o", tmp_path / "a.lac")
    assert "[red]" in shown
    assert "[/x]" in shown


def test_weights_alone_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "a.pt")
    with pytest.raises(SystemExit) as ended:
        main(["shrink", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.lac"), "--budget", "0.01"])
    assert ended.value.code == 2
    assert "--budget" in capsys.readouterr().err
    assert not (tmp_path / "a.lac").exists()


def test_a_budget_in_percent_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shrink", "digits-mlp", "-o", str(tmp_path / "a.lac"), "--budget", "5"])
    assert ended.value.code == 2
    assert "0.01 is a point of accuracy" in capsys.readouterr().err
