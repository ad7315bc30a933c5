"""The benchmark runs from end to end on the bundled digits, and what it draws is what the paper's table says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import laconic
from benchmarks.__main__ import main
from benchmarks.shrink import coders, vgg16
from benchmarks.shrink import networks as lab
from benchmarks.shrink import shrink as bench_shrink
from benchmarks.shrink.deep_compression import BESIDE, PAPER, beside
from laconic.shrinking import Plan
from laconic.shrinking.parts import Shared
from laconic.shrinking.training import TaskTraining
from laconic.workloads import get, models


def test_networks_and_coders_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = lab.Network("digits-mlp", 3, 1, 1, 0.5, (lab.Goal(0.2, 4, 1), lab.Goal(0.1, 3, 1)))
    monkeypatch.setitem(lab.NETWORKS, "digits-mlp", quick)
    words = ["--part", "networks", "--network", "digits-mlp", "--seeds", "1", "--json"]
    with pytest.raises(SystemExit):
        main(["shrink", *words])
    found = json.loads(capsys.readouterr().out)
    first, second = found["results"]
    assert second["ratio"] > first["ratio"] > 15
    assert first["dense_nbytes"] / first["file_nbytes"] == first["ratio"]
    wrong = first["newly_wrong"] - first["newly_right"]
    assert first["shrunk_error"] - first["dense_error"] == pytest.approx(wrong / 359, abs=1e-6)
    assert [row["no_loss"] for row in found["summary"]] == [None, None]  # of one seed nothing is known
    coders = {row["coder"]: row["nbytes"] for row in found["coders"] if "10.0% kept" in row["symbols_of"]}
    assert coders["laconic"] < coders["han"]


def test_parts_that_were_not_asked_for_have_no_tables(capsys: pytest.CaptureFixture[str]) -> None:
    bench_shrink._show([], [], [], [])
    assert not capsys.readouterr().out
    bench_shrink._echo_layers(laconic.shrink(nn.Linear(9, 5)).report(), "not of the paper")
    assert "paper" not in capsys.readouterr().out


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shrink", "--part", "network"])
    assert ended.value.code == 2
    assert "did you mean 'networks'" in capsys.readouterr().err


def test_drawn_symbols_have_the_published_densities() -> None:
    made = [part for part in vgg16.drawn(scale=0.02).values() if isinstance(part, Shared) and part.masked]
    layers = PAPER["vgg16"].layers
    assert len(made) == len(layers) == 16
    for part, layer in list(zip(made, layers, strict=True))[5:]:
        assert part.density == pytest.approx(layer.kept / 100, rel=0.1)
        counts = np.bincount(part.symbols[part.symbols > 0])
        share = counts[counts > 0] / counts.sum()
        assert -(share * np.log2(share)).sum() == pytest.approx(layer.weight_bits, abs=0.3)


def test_a_benchmark_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = lab.Network("digits-mlp", 2, 2, 1, 0.5, (lab.Goal(0.2, 4, 1),))
    monkeypatch.setitem(lab.NETWORKS, "digits-mlp", quick)

    def rows(folder: Path | None) -> list[dict[str, object]]:
        return [made.row for made in lab.train_and_shrink("digits-mlp", 0, lambda line: None, folder)]

    whole, calls, train = rows(None), [], TaskTraining.__call__

    def interrupted(self: TaskTraining, model: nn.Module) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        train(self, model)

    monkeypatch.setattr(TaskTraining, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows(tmp_path)
    assert rows(tmp_path) == whole
    assert len(calls) == 5


def test_no_loss_needs_the_mean_and_its_bound() -> None:
    def row(seed: int, rise: float) -> dict[str, object]:
        return {"network": "n", "goal_density": 0.1, "bits": 3, "seed": seed, "dense_error": 0.02, "ratio": 50.0,
                "shrunk_error": 0.02 + rise, "file_nbytes": 100}  # fmt: skip

    def verdict(*rises: float) -> object:
        (found,) = lab.summarise([row(seed, rise) for seed, rise in enumerate(rises)])
        return found["no_loss"]

    assert verdict(-0.001, -0.0005, 0.0) is True
    assert verdict(0.0004, 0.0002, -0.0001) is False  # the mean rose
    assert verdict(-0.01, 0.009) is False  # nobody knows
    assert verdict(-0.001) is None


@pytest.mark.parametrize(
    ("network", "model"), [("lenet-300-100", "mlp((784, 300, 100, 10))"), ("lenet-5", "lenet"), ("vgg16", "vgg16")]
)
def test_the_papers_sizes_follow_from_its_bits(network: str, model: str) -> None:
    with torch.device("meta"):
        weights = [weight for weight in models.build(model).parameters() if weight.dim() > 1]
    for weight, layer in zip(weights, PAPER[network].layers, strict=True):
        codebook = 64 if network == "lenet-300-100" else 256 if weight.dim() > 2 else 32
        bits = layer.kept / 100 * (layer.weight_bits + layer.index_bits) / 32
        assert 0.97 < layer.size / 100 / (bits + codebook / weight.numel()) < 1.25


def test_weights_with_channels_last_come_back() -> None:
    weight = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    assert coders.lossless({"weight": weight})[0]["coder"] == "laconic exact"  # and nothing is raised


def test_the_paper_stands_beside(tmp_path: Path) -> None:
    shrunk = laconic.shrink(get("mnist-300-100").build(0), plan=Plan(density=0.05, bits=3))
    lines = beside(shrunk.report(), "lenet-300-100")
    assert {len(line) for line in lines} == {len(BESIDE)}
    assert lines[0][-4:] == ["8", "4.4", "3.7", "43.1×"]
    assert lines[1][-4:] == [""] * 4  # a bias
    assert lines[-1][-1] == "40.2×"
