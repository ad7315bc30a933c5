"""`laconic codecs`, `laconic bench codecs`: what they print."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from laconic.cli import codecs as codecs_command
from laconic.codecs import names
from laconic_lab.commands import bench

app = typer.Typer()
app.command("list")(codecs_command.codecs)
app.command("speed")(bench.codecs)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_codecs_lists_every_codec_on_one_line():
    lines = run("list").splitlines()
    assert len(lines) == len(names())
    for name, line in zip(names(), lines, strict=True):
        spec, bits, bias, rounding, source, summary = line.split("\t")
        assert spec.startswith(name)
        assert bits
        assert bias in ("biased", "unbiased", "exact")
        assert rounding in ("stochastic", "deterministic")
        assert source
        assert summary


def test_codecs_json_counts_real_bits():
    entries = {entry["name"]: entry for entry in json.loads(run("list", "--json"))["codecs"]}
    assert sorted(entries) == names()
    assert entries["none"]["bits_per_element"] == 32 + 16 * 8 / 1_000_000
    assert 1 < entries["onebit"]["bits_per_element"] < 1.3
    assert 1.6 <= entries["ternary"]["bits_per_element"] < 1.7
    assert entries["qsgd"]["unbiased"]
    assert not entries["dynamic8"]["unbiased"]
    assert entries["entropy"]["bits_per_element"] is None


def test_bench_codecs_json_is_the_record():
    chosen = ("--codec", "none", "--codec", "fp16")
    record = json.loads(run("speed", "--numel", "5000", "--repeats", "2", *chosen, "--json"))
    assert [row["codec"] for row in record["results"]] == ["none", "fp16"]
    assert {"memcpy_ns", "results", "peers"} <= set(record)


def test_bench_codecs_prints_plain_lines_when_piped():
    lines = run("speed", "--numel", "5000", "--repeats", "2", "--codec", "fp16").splitlines()
    assert lines[0].split("\t")[0] == "codec"
    assert lines[1].startswith("fp16\t")
    assert any("memcpy of 5,000 floats" in line for line in lines)
