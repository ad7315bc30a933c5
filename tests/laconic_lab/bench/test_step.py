"""`laconic bench step`: figures that agree with each other, turns that are taken once, and an end when a rank fails."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from laconic.cli import main
from laconic.errors import BadInput
from laconic.exchange.chooser import TRIAL_STEPS, WARM_STEPS
from laconic.exchange.late_hook import WATCHED
from laconic.transports.launcher import RankFailed
from laconic_lab.bench import step as step_lab
from laconic_lab.bench.kernel_time import kernel_seconds
from laconic_lab.bench.readiness import Readiness, watch
from laconic_lab.bench.step import Measured, ProcessPlace, StepSpec, measure
from laconic_lab.bench.turns import TurnStore
from laconic_lab.runs.spec import configuration
from laconic_lab.runs.strategies import options_of
from tests.laconic_lab.clusters.test_cluster import needs_root

FIELDS = {
    "config", "step_seconds", "compute_seconds", "wire_seconds", "bound_seconds", "ratio_to_bound", "processor_seconds",
    "sent_nbytes", "loss", "peak_rss_nbytes",
}  # fmt: skip


def assert_consistent(record: dict, blocks: int) -> None:  # type: ignore[type-arg]
    for row in [record["alone"], *record["results"]]:
        assert row.keys() >= FIELDS
        assert row["compute_seconds"] == record["alone"]["step_seconds"] > 0
        assert row["bound_seconds"] == max(row["compute_seconds"] + row["kernel_seconds"], row["wire_seconds"])
        assert row["ratio_to_bound"] == pytest.approx(row["step_seconds"] / row["bound_seconds"])
        assert row["processor_seconds"] == pytest.approx(sum(row["processor_seconds_by_thread"].values()))
        assert row["processor_seconds"] > 0
        assert len(row["block_seconds"]) == blocks
        assert row["step_seconds_interval"][0] <= row["step_seconds"] <= row["step_seconds_interval"][1]
        assert row["peak_rss_nbytes"] > 50e6  # a process with torch in it
        assert row["loss"] > 0
    for row in record["results"]:
        assert row["replicas_identical"]
        if row["ddp_bound_seconds"] is not None:
            assert row["ddp_bound_seconds"] >= row["bound_seconds"] * (1 - 1e-9)
        assert row["layer_bound_seconds"] >= row["bound_seconds"]


@pytest.mark.processes
def test_a_tiny_run_without_root_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "digits-mlp", "--configs", "ddp,distribute:dynamic8,feedback=false", "--no-peers"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", *words, "--blocks", "2", "--steps", "2", "--batch", "8", "--warm-up", "1", "--json"])
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["config"] for row in record["results"]] == ["ddp", "distribute:dynamic8,feedback=false"]
    assert_consistent(record, blocks=2)
    alone, ddp, ours = record["alone"], *record["results"]
    assert (alone["sent_nbytes"], alone["kernel_seconds"], ddp["kernel_seconds"]) == (0, 0, 0)
    assert ddp["sent_nbytes"] == 4 * 85_002  # 2(P−1)/P of float32, P = 2
    assert 85_002 < ours["sent_nbytes"] < 1.1 * 85_002
    assert ours["kernel_seconds"] > 0
    assert [row["wire_seconds"] for row in record["results"]] == [0, 0]  # no limit
    assert record["configuration"]["link"] == "loopback"
    assert ddp["loss"] == pytest.approx(ours["loss"], rel=0.05)  # the same steps, nearly the same gradients


@needs_root
@pytest.mark.processes
def test_on_emulated_hosts_the_interface_counts_and_the_link_is_the_wire() -> None:
    spec = StepSpec("digits-mlp", ["compress:dynamic8"], link="10mbit", batch=8, blocks=1, steps=2, warm_up=1)
    record = measure(spec)
    assert_consistent(record, blocks=1)
    (ours,) = record["results"]
    assert 85_002 < ours["sent_nbytes"] < 1.3 * 85_002  # with headers and acknowledgements
    assert ours["wire_seconds"] == pytest.approx(8 * ours["sent_nbytes"] / 10e6)
    assert ours["step_seconds"] > 0.8 * ours["wire_seconds"]


def fails(spec: StepSpec, place: ProcessPlace) -> Measured:
    """One rank of the second configuration fails; all others wait for their turn."""
    if place.first == 1 and os.environ["RANK"] == "1":
        raise ValueError("this rank fails on purpose")
    dist.init_process_group("gloo")
    with TurnStore(*place.store).taken(place.count + 1):
        return Measured()


@pytest.mark.processes
def test_a_rank_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_lab, "run_rank", fails)
    begun = time.monotonic()
    with pytest.raises(RankFailed, match="this rank fails on purpose"):
        measure(StepSpec("digits-mlp", ["ddp"]))
    assert time.monotonic() - begun < 60  # they would wait for hours


def test_the_least_that_ddp_allows() -> None:
    late = Readiness(((0.8, 1.0),), 0.8)  # all gradients at the end of backward: nothing can be hidden
    assert late.ddp_bound_seconds(compute_s=1.0, wire_s=3.0) == pytest.approx(4.0)
    early = Readiness(((0.2, 0.5), (0.8, 0.5)), 0.8)  # half of them may be sent during backward
    assert early.ddp_bound_seconds(compute_s=1.0, wire_s=1.0) == pytest.approx(0.8 + 0.5 + 0.2)
    assert early.ddp_bound_seconds(compute_s=1.0, wire_s=0.0) == pytest.approx(1.0)


def test_the_least_that_layers_allow() -> None:
    layers = Readiness(((0.6, 0.5), (1.0, 0.5)), 1.0, needed=(0.2, 0.0))
    assert layers.layer_bound_seconds(compute_s=1.0, wire_s=0.0) == pytest.approx(1.0)
    assert layers.layer_bound_seconds(compute_s=1.0, wire_s=1.0) == pytest.approx(1.5)  # the first layer's wire
    assert layers.layer_bound_seconds(compute_s=1.0, wire_s=3.0) == pytest.approx(3.0 + 0.4)  # both wait for 0.2 … 0.6


def test_gradients_and_weights_are_timed_in_a_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> float:
        begun = time.perf_counter()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return begun

    found = watch(model, optimizer, run)
    assert sorted(share for _, share in found.shares) == pytest.approx([2 / 30, 4 / 30, 8 / 30, 16 / 30])
    for needed, (made, _) in zip(found.needed, found.shares, strict=True):
        assert 0 < needed < made <= found.backward < 1
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_auto_has_the_time_it_takes_to_choose() -> None:
    chosen = [configuration(name, 2) for name in ("ddp", "compress:auto")]
    spec = StepSpec("digits-mlp", ["ddp", "compress:auto"])
    assert spec.settled(chosen).warm_up == 20 > WATCHED + WARM_STEPS + TRIAL_STEPS
    assert spec.settled(chosen[:1]).warm_up == 3
    assert replace(spec, warm_up=7).settled(chosen).warm_up == 7


def test_kernels_cost_what_the_codec_computes() -> None:
    coded = kernel_seconds([("dynamic8", "direct", 200_000)], 4)
    assert coded > 0
    assert kernel_seconds([("none", "native", 1000), ("powersgd(2)", "ring", 1000), ("unheard-of", "x", 9)], 4) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hosts", "1"], "--hosts must be at least 2, got 1"),
        (["--blocks", "0"], "--blocks must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--warm-up", "0"], "--warm-up must be at least 1, got 0"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--workload", "digits-mpl"], "did you mean 'digits-mlp'"),
        (["--configs", "dynamic9"], "did you mean 'dynamic8'"),
        (["--configs", "distribute:dynamic8,feedbock=true"], "did you mean 'feedback'"),
        (["--configs", "ddp,feedback=true"], "options go with compress and distribute"),
        (["--link", "fast"], "the rate is 'unlimited', or should be a number"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_options_reach_the_door_and_words_for_the_reader_do_not() -> None:
    chosen = configuration("distribute:dynamic8,overlap=false,algorithm=ring", 2)
    told = replace(chosen, options={**chosen.options, "bytes": "counted by the exchange"})
    assert options_of(told) == {"algorithm": "ring", "overlap": False}
    assert options_of(configuration("compress:dynamic8", 2)) == {"algorithm": "auto"}


@pytest.mark.parametrize("name", ["distribute:dynamic8,feedback", "elastic:none,feedback=true", "single,feedback=true"])
def test_options_that_do_not_go_with_a_configuration(name: str) -> None:
    with pytest.raises(BadInput, match="option"):
        configuration(name, 2)
