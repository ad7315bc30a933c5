"""The four 8-bit types beside Table 1 of their paper."""

from __future__ import annotations

import json

import pytest

from benchmarks.codecs import approximation
from laconic.errors import BadInput
from tests.benchmarks.commands import printed


def test_approximation_reproduces_the_papers_relative_errors():
    """dynamic8 and linear8 within 15 % of Table 1 or better, normalised over the whole tensor as in the paper."""
    record = approximation.run(1_000_000)
    assert len(record["results"]) == 32
    for row in record["results"]:
        assert row["mean_abs_error"] > 0
        if row["type"] in ("dynamic8", "linear8"):
            assert row["mean_rel_error"] <= 1.15 * row["paper_mean_rel_error"], row


def test_approximation_draws_every_distribution_anew():
    """Scaled copies of one sample would have the same relative errors under a codec that scales."""
    rows = approximation.run(1000)["results"]
    errors = [row["mean_rel_error"] for row in rows if row["codec"] == "linear8(none)"]
    assert len(errors) == len(approximation.DISTRIBUTIONS)
    assert all(abs(a - b) > 1e-4 * a for i, a in enumerate(errors) for b in errors[:i])


def test_approximation_shows_the_impossible_absolute_errors():
    record = approximation.run(100_000)
    uniform = [row for row in record["results"] if row["distribution"] == "U(0,1)"]
    assert uniform
    assert all(row["mean_abs_error"] >= 1 / 1024 * 0.99 for row in uniform)
    assert "1/1024" in record["caution"]


def test_plot_is_a_self_contained_page(tmp_path):
    path = tmp_path / "a.html"
    approximation.write_plot(approximation.run(1000), path)
    page = path.read_text()
    assert page.count("<svg") == 4  # both errors, wide and narrow
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "dynamic8" in page
    with pytest.raises(BadInput, match="cannot write"):
        approximation.write_plot(approximation.run(1000), tmp_path / "absent" / "a.html")


def test_approximation_refuses_no_samples():
    with pytest.raises(BadInput, match="at least 1"):
        approximation.run(0)


def test_it_prints_ours_beside_the_papers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "plot" not in json.loads(printed(capsys, "approximation", "--samples", "2000", "--json"))
    assert not list(tmp_path.iterdir())  # no file that was not asked for
    plot = tmp_path / "plot.html"
    output = printed(capsys, "approximation", "--samples", "20000", "--plot", str(plot))
    assert plot.exists()
    assert "Caution" in output
    assert "N(0,0.2²)\tstatic8" in output
    record = json.loads(printed(capsys, "approximation", "--samples", "2000", "--plot", str(plot), "--json"))
    assert len(record["results"]) == 32
