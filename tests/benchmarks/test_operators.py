"""`python -m benchmarks operators`: the form of its JSON, the ladder, the errors, and refusals; never how fast."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.operators import layer_sets
from laconic.operators import Convolution


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch):
    layers = [("a 3×3", 2, Convolution(1, 4, 4, (12, 12), (3, 3), (1, 1), (1, 1), (1, 1)))]
    monkeypatch.setitem(layer_sets._SETS, "vgg16", layers)


def run(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["operators", *words])
    return stopped.value.code, capsys.readouterr()


@pytest.mark.parametrize("train", [(), ("--train",)])
def test_json_has_the_promised_fields(capsys, train):
    code, out = run(capsys, "--json", "--turns", "3", "--batch", "1", "--batch", "2", *train)
    assert code == 0
    found = json.loads(out.out)
    assert [row["batch"] for row in found["results"]] == [1, 2]
    wanted = {"set", "layer", "batch", "method", "micro_batch", "forward_ms", "backward_ms", "native_ms", "speedup",
              "max_error", "workspace_nbytes"}  # fmt: skip
    assert wanted <= found["results"][0].keys()
    assert (found["results"][0]["backward_ms"] is None) == (not train)
    assert found["results"][0]["max_error"] <= 1e-5
    assert set(found["geometric_mean"]) == {"vgg16 N=1", "vgg16 N=2", "vgg16 3×3 N=1", "vgg16 3×3 N=2"}
    assert found["environment"]["versions"]["torch"]


def test_errors_of_all_methods_are_within_their_bounds(capsys):
    code, out = run(capsys, "--validate")
    assert code == 0
    assert "winograd(4)" in out.out
    assert "!" not in out.out
    code, out = run(capsys, "--validate", "--json")
    assert all(row["passed"] for row in json.loads(out.out)["validation"])


def test_the_ladder(capsys, monkeypatch):
    code, out = run(capsys, "--ladder", "--turns", "1", "--json")
    assert code == 0
    rungs = {rung["name"]: rung for rung in json.loads(out.out)["ladder"]}
    assert list(rungs)[:4] == ["naive", "blocked", "SIMD", "transposed GEMM"]
    assert all(rung["max_error"] < 2e-5 for rung in rungs.values())
    assert rungs["naive"]["multiplications"] == 2.25 * rungs["winograd(2)"]["multiplications"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--set", "vgg17"), "unknown set of layers 'vgg17'"),
        (("--layer", "conv9"), "unknown layer of vgg16 'conv9'"),
        (("--batch", "0"), "--batch must be at least 1, got 0"),
        (("--policy", "halves"), "unknown micro-batching policy"),
        (("--tolerance", "1e-15"), "no method meets a tolerance of 1e-15"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, sentence):
    code, out = run(capsys, *words)
    assert code == 2
    assert sentence in out.err
    assert len(out.err.strip().splitlines()) == 1
