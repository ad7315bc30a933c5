"""The benchmark runs from end to end on the bundled digits, and what it draws is what the paper's table says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from laconic.cli import main
from laconic.lab.bench import shrink as lab


def test_networks_and_coders_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = lab.Network("digits-mlp", 3, 1, 1, 0.5, (lab.Goal(0.2, 4), lab.Goal(0.1, 3)), "")
    monkeypatch.setitem(lab.NETWORKS, "digits-mlp", quick)
    words = ["--part", "networks", "--part", "coders", "--network", "digits-mlp", "--seeds", "1", "--json"]
    with pytest.raises(SystemExit):
        main(["bench", "shrink", *words])
    found = json.loads(capsys.readouterr().out)
    first, second = found["results"]
    assert second["ratio"] > first["ratio"] > 15
    assert first["dense_nbytes"] / first["file_nbytes"] == first["ratio"]
    wrong = first["newly_wrong"] - first["newly_right"]
    assert first["shrunk_error"] - first["dense_error"] == pytest.approx(wrong / 359, abs=1e-6)
    coders = {row["coder"]: row["nbytes"] for row in found["coders"]}
    assert coders["laconic"] < coders["han"]


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "shrink", "--part", "network"])
    assert ended.value.code == 2
    assert "did you mean 'networks'" in capsys.readouterr().err


def test_drawn_symbols_have_the_published_densities() -> None:
    made = list(lab.vgg16_symbols(scale=0.02))
    assert len(made) == 16
    for (_, symbols, levels), (kept, bits, _) in zip(made[5:], lab.VGG16[5:], strict=True):
        assert np.count_nonzero(symbols) / symbols.size == pytest.approx(kept / 100, rel=0.1)
        counts = np.bincount(symbols[symbols > 0])
        share = counts[counts > 0] / counts.sum()
        assert -(share * np.log2(share)).sum() == pytest.approx(bits, abs=0.3)
        assert symbols.max() <= levels
