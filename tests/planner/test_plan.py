"""Predictions against what must hold, plans against what is known to be right, and files that were changed."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.cli import main
from laconic.errors import BadInput, UnknownName
from laconic.exchange.costs import plain_cost
from laconic.operators import timing
from laconic.parallel.predict import predict as predict_division
from laconic.planner import devices, work
from laconic.planner.cost import cost
from laconic.planner.growth import phases, totals
from laconic.planner.pieces import buckets, ends_of_stages, limits
from laconic.planner.plan import (
    Asked,
    Plan,
    crossings,
    division_of,
    keep_calibrations,
    plan,
    scale,
    setting_of,
    strategies,
)
from laconic.planner.predict import Calibration, Setting, block_mode, largest_of, predict, rate_needed
from laconic.planner.strategy import Strategy
from laconic.planner.subject import subject
from laconic.planner.work import LayerTime, Work
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.storage.files import cache_folder
from laconic.transports.loggp import simulate
from laconic.workloads.batch_schedules import CONSTANT, Grow

GBIT = Link.parse("1gbit,50us")


def made(link: Link = GBIT, seconds: float = 0.01, parameters: int = 1_000_000, spread: float = 0.0) -> Setting:
    """Four equal dense layers."""
    layers = tuple(LayerTime(f"{i}", "Linear", seconds, 2 * seconds, parameters, 4096) for i in range(4))
    speeds = {"none": (0.0, 0.0), "fp16": (5e-10, 5e-10), "dynamic8": (2e-9, 1e-9)}
    return Setting(Work(layers, 32, seconds, spread, "made"), cost("lenet", 32), 64, link, speeds)


def test_one_machine_takes_as_long_as_its_layers() -> None:
    setting = made()
    assert predict(setting, Strategy()).seconds == pytest.approx(2 * 4 * 0.03 + 0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nothing_is_quicker_than_computing(ranks: int) -> None:
    setting = made(Link(0.0, 0.0))
    for way in strategies(setting, Asked(ranks)):
        found = predict(setting, way)
        assert found.seconds >= found.compute_s > 0
        assert found.low <= found.seconds <= found.high
        assert found.exposed_s == pytest.approx(0.0, abs=1e-12) or way.kind in ("pipeline", "hybrid", "tensor")
    data = predict(setting, Strategy(data=ranks))
    assert data.seconds == pytest.approx(8 * 0.03 / ranks + 0.01)


def test_overlap_hides_what_it_says() -> None:
    setting = made()
    bare, ddp, step = (predict(setting, Strategy(data=2, overlap=o)) for o in ("none", "backward", "step"))
    assert bare.seconds > ddp.seconds > step.seconds
    assert bare.exposed_s == pytest.approx(bare.wire_s)
    assert ddp.sent_nbytes == pytest.approx(4 * 4_000_000)  # 2 (P − 1) / P of float32


def test_divided_dense_layers_wait_for_the_bytes_they_send() -> None:
    """Over a link that nothing can hide, a step waits for what it sends, but for latencies."""
    slow = Link(0.0, 1e-3)
    found = predict(made(slow, seconds=1e-6), Strategy(data=4, dense_split=True))
    assert found.exposed_s == pytest.approx(found.sent_nbytes * slow.s_per_byte, rel=0.01)


def test_a_rank_of_three_divisions_sends_its_part_of_its_stage() -> None:
    """Two stages of two equal layers each, every layer shared by two: a quarter of all gradients."""
    whole, part = (predict(made(), way) for way in (Strategy(data=2), Strategy(2, 2, 2, micro_batches=4)))
    inside = predict(made(), Strategy(1, 2, 2, micro_batches=4))
    batch_share = 2  # a replica has half of the samples of the one that is alone
    assert part.sent_nbytes - inside.sent_nbytes / batch_share == pytest.approx(whole.sent_nbytes / 4)


def test_stragglers_slow_the_whole_down() -> None:
    assert largest_of(1) == 0.0
    calm, wild = (predict(made(spread=s), Strategy(data=8)).compute_s for s in (0.0, 0.1))
    assert wild / calm == pytest.approx(1 + 0.1 * largest_of(8))


@pytest.mark.parametrize("ranks", [2, 4, 8, 13])
def test_closed_forms_are_what_the_simulator_says(ranks: int) -> None:
    numel = 1 << 16
    found = plain_cost(numel, ranks, GBIT)
    schedule = registry.build("all_reduce", found.form, ranks, numel)
    assert simulate(schedule, GBIT).seconds == pytest.approx(found.wire_s, rel=0.1)
    assert found.sent_nbytes * ranks == pytest.approx(4 * schedule.sent_numel, rel=0.01)


@settings(max_examples=40)
@given(times=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=7), count=st.integers(1, 4))
def test_stages_are_as_even_as_can_be(times: list[float], count: int) -> None:
    layers = tuple(LayerTime(str(i), "Linear", t, 0.0, 1, 1) for i, t in enumerate(times))
    found = ends_of_stages(layers, count)
    assert len(found) < count
    longest = max(sum(times[a:b]) for a, b in itertools.pairwise((0, *found, len(times))))
    best = min(
        max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cuts, len(times))))
        for k in range(min(count, len(times)))
        for cuts in itertools.combinations(range(1, len(times)), k)
    )
    assert best <= longest * (1 + 1e-6) <= 1.02 * best * (1 + 1e-6)


def test_buckets_hold_every_value_once() -> None:
    layers = tuple(LayerTime(str(i), "Linear", 0.1, 0.1, n, 1) for i, n in enumerate((5, 20_000_000, 300_000, 7)))
    found = list(buckets(layers, 1.0, limits(Strategy(data=2))))
    assert [(each.numel, each.first) for each in found] == [(300_007, 2), (20_000_000, 1), (5, 0)]
    assert [each.ready_s for each in found] == pytest.approx([0.2, 0.3, 0.4])
    ours = buckets(layers, 1.0, limits(Strategy(data=2, overlap="step")))  # messages of 256 KiB
    assert [each.numel for each in ours] == [300_007, 20_000_000, 5]
    assert limits(Strategy(data=2, codec="dynamic8"))[0] == pytest.approx(4 * 65_536, rel=0.01)


ELSEWHERE = {"device": "v100", "batch": 256}


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("vgg16", Asked(4, "5gbit,50us", **ELSEWHERE), "Compressing pays"),
        ("resnet50", Asked(8, "400gbit,2us", **ELSEWHERE), "Do not compress"),
        ("mlp", Asked(4, "1mbit,50ms", device="v100", batch=128, quality="exact"), "One machine is faster"),
    ],
)
def test_the_verdict(model: str, asked: Asked, said: str, tmp_path: Path) -> None:
    found = plan(model, asked, tmp_path)
    assert said in " ".join(found.verdict())
    assert found.ddp is not None
    assert found.chosen.seconds <= 1.03 * min(found.ddp.seconds, found.one.seconds)
    assert (found.chosen.strategy.ranks == 1) == (said == "One machine is faster")


def test_memory_drops_what_does_not_fit(tmp_path: Path) -> None:
    wide = plan("vgg16", Asked(8, "10gbit", memory_nbytes=10**12, **ELSEWHERE), tmp_path)
    tight = plan("vgg16", Asked(8, "10gbit", memory_nbytes=int(3e9), **ELSEWHERE), tmp_path)
    assert tight.dropped > wide.dropped == 0
    assert max(each.memory_nbytes for each in tight.candidates) <= 3e9
    with pytest.raises(BadInput, match="nearest is"):
        plan("vgg16", Asked(8, "10gbit", memory_nbytes=1000, **ELSEWHERE), tmp_path)


def test_a_profile_has_its_memory(tmp_path: Path) -> None:
    """A model of 7 · 10⁹ weights: neither one A100 nor DDP on eight has the memory, and neither is shown."""
    model = torch.nn.Sequential(*(torch.nn.Linear(20_000, 20_000, device="meta") for _ in range(17)))
    chosen = subject(model, (20_000,), optimizer="adam")
    found = plan(chosen, Asked(16, "100gbit,2us", device="a100"), tmp_path)
    assert found.limit_nbytes == 40 * 10**9
    assert max(each.memory_nbytes for each in found.candidates) <= 40e9 < found.one.memory_nbytes
    assert found.ddp is None
    assert not found.fits(found.one)
    assert any("One machine does not have enough memory" in sentence for sentence in found.verdict())
    assert plan(chosen, Asked(16, device="a100", memory_nbytes=10**12), tmp_path).ddp is not None
    assert [point.ranks for point in scale(chosen, Asked(16, "100gbit,2us", device="a100"), tmp_path)][-1] == 16
    with pytest.raises(BadInput, match="fits in 40 GB; nearest is"):
        plan(chosen, Asked(2, device="a100"), tmp_path)


def test_rows_that_do_not_fit_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "vgg16", "-n", "8", "--batch", "256", "--device-profile", "h100", "--memory", "3GB"])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "plans need more than 3.00 GB a machine and are not shown." in text
    assert "DDP × 8\t" not in text
    assert "one machine\t" not in text


def test_both_links_are_shown_and_a_range_has_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--link", "100gbit,2us", "--between", "25gbit,5us", "--per-host", "8", "--device-profile", "v100"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "lenet", "-n", "16", *options])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "link 100gbit,2us inside a host of 8, 25gbit,5us between hosts;" in text
    assert re.search(r"\d – [\d.,]+ (s|ms|µs)", text)
    assert not re.search(r"(s|min) – ", text)


@pytest.mark.parametrize("link", ["1gbit,50us", "10gbit,20us", "400gbit,2us"])
@pytest.mark.parametrize(("model", "device"), [("vgg16", "v100"), ("alexnet", "rtx-4090")])
def test_the_verdict_agrees_with_the_choice(model: str, device: str, link: str, tmp_path: Path) -> None:
    for ranks in (2, 4):
        found = plan(model, Asked(ranks, link, device=device, batch=256), tmp_path)
        compresses = found.chosen.strategy.codec != "none"
        assert any(sentence.startswith("Compressing pays") for sentence in found.verdict()) == compresses


def test_a_plan_is_json_both_ways(tmp_path: Path) -> None:
    found = plan("lenet", Asked(2, device="v100"), tmp_path).plan()
    assert Plan.from_json(found.to_json()) == found
    with pytest.raises(BadInput, match="cannot be read"):
        Plan.from_json(found.to_json().replace('"ranks": 2', '"ranks": 3'))
    with pytest.raises(BadInput, match="not a plan"):
        Plan.from_json("{}")
    ways = {
        Strategy(data=2): "ddp",
        Strategy(data=2, codec="dynamic8"): "compress:dynamic8",
        Strategy(data=2, codec="dynamic8", overlap="step"): "distribute:dynamic8",
        Strategy(data=2, consistency="local(8)"): "distribute:none@local(8)",
    }
    for way, name in ways.items():
        assert replace(found, strategy=way).configuration == name
    divided = replace(found, strategy=Strategy(pipeline=2, micro_batches=4))
    with pytest.raises(BadInput, match="its own loop"):
        _ = divided.configuration


def test_a_plan_is_what_divide_and_distribute_take(tmp_path: Path) -> None:
    found = plan("lenet", Asked(2, device="v100"), tmp_path).plan()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    coded = replace(found, strategy=Strategy(data=2, codec="fp16"), division=None)
    with pytest.raises(BadInput, match=r"laconic\.distribute"):
        laconic.divide(model, coded)
    job = laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan=coded)
    assert str(job.state.buckets.choice.codec_for(0, 0)) == "fp16"
    job.close()
    with pytest.raises(BadInput, match="leave these two out"):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), codec="fp16", plan=coded)
    divided = replace(found, strategy=Strategy(tensor=2), division="0=dense(output); 2=dense(input)")
    assert laconic.divide(model, divided)(torch.ones(3, 8)).shape == (3, 4)
    assert divided.configuration == "divide:none@0=dense(output); 2=dense(input)"


@pytest.mark.processes
def test_training_by_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    made = plan("digits-mlp", Asked(2, device="v100"), tmp_path).plan()
    file.write_text(replace(made, strategy=Strategy(data=2, codec="fp16"), division=None).to_json())
    options = ["--plan", str(file), "--epochs", "1", "--runs", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *options])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["results"][0]["config"] == "compress:fp16"
    for wrong, said in ((["--codec", "fp16"], "--plan says how"), (["digits-cnn"], "is a plan for 'digits-mlp'")):
        with pytest.raises(SystemExit):
            main(["train", *options, *wrong])
        assert said in capsys.readouterr().err


def test_a_division_is_one_that_divide_takes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4), torch.nn.Linear(4, 2))
    layers = [LayerTime(str(i), type(m).__name__, 1.0, 2.0, 1, 1) for i, m in enumerate(model)]
    spec = division_of(Strategy(tensor=2), layers)
    assert spec == "0=dense(output); 2=dense(input)"
    sent = predict_division(model, spec, torch.ones(3, 8), ranks=2).nbytes
    # half of a ring's all-reduce of 3 × 4 outputs, each way
    assert sent == plain_cost(12, 2, GBIT).sent_nbytes
    assert division_of(Strategy(pipeline=2, micro_batches=4), layers) == "stages(auto, micro=4)"
    assert division_of(Strategy(data=2), layers) is None


def test_sixty_five_thousand_ranks_and_hosts(tmp_path: Path) -> None:
    asked = Asked(65536, "1tbit,1us", device="a100", between="100gbit,5us", per_host=8)
    points = scale("resnet18", asked, tmp_path)
    assert [point.ranks for point in points] == [2**k for k in range(1, 17)]
    assert all(0 < point.efficiency("data") <= 1.01 for point in points)
    assert crossings(points)


def test_one_machine_has_no_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ranks, batch in ((1, 8), (67, 1)):  # 67 replicas need 67 samples, and 67 has no divisor
        asked = Asked(ranks, batch=batch, device="v100")
        found = [point.ranks for point in scale("digits-mlp", asked, tmp_path)]
        assert found == [power for power in (2, 4, 8, 16, 32, 64) if power < ranks]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "digits-mlp", "-n", "1", "--scale", "--device-profile", "v100"])
    assert ended.value.code == 0
    assert "no way to divide" in capsys.readouterr().out


def test_what_was_fitted_here_says_nothing_of_other_machines(tmp_path: Path) -> None:
    keep_calibrations({"ddp": Calibration(message_s=1.0, low=0.9, high=1.1)}, tmp_path)
    here, there = (setting_of(subject("digits-mlp"), Asked(2, device=name), tmp_path) for name in ("here", "v100"))
    assert here.calibrations
    assert not there.calibrations


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever else runs here, what is measured counts as undisturbed."""
    yield from load_is(monkeypatch, math.inf)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is measured counts as disturbed."""
    yield from load_is(monkeypatch, 0.0)


def load_is(monkeypatch: pytest.MonkeyPatch, limit: float) -> Iterator[None]:
    monkeypatch.setattr(timing, "BUSY", limit)
    monkeypatch.setattr(work, "UNSTEADY", limit)
    devices._measured.cache_clear()
    yield
    devices._measured.cache_clear()


def test_what_was_measured_on_a_busy_machine_is_told_and_not_kept(
    tmp_path: Path, busy: None, one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = Asked(2, "100mbit")
    planned = plan("digits-mlp", asked)
    assert planned.setting.device is not None
    assert planned.setting.device.busy
    assert planned.verdict()[0] == devices.UNSURE
    assert devices.UNSURE not in plan("digits-mlp", replace(asked, device="v100")).verdict()
    counted = cost("digits-mlp", 32)
    assert work.measure(subject("digits-mlp"), counted, None).busy
    with pytest.raises(SystemExit):
        main(["profile", "digits-mlp", "--batch", "32"])
    said = capsys.readouterr().out
    assert devices.UNSURE in said
    assert "kept for" not in said
    assert work.known(counted, cache_folder()) is None
    assert all(path.name.startswith("codec") for path in devices.kept_in().iterdir())


def test_the_plan_names_the_profile_that_it_needs(
    tmp_path: Path, idle: None, one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "typed_model.py").write_text(
        "from laconic import workloads\ndef mine():\n    return workloads.get('digits-mlp')\n"
        "def net():\n    import torch\n    return torch.nn.Linear(5, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for typed, options in (("typed_model:mine", ""), ("typed_model:net", " --input-shape 5 --optimizer adam")):
        arguments = ["plan", typed, "-n", "2", *options.split()]
        command = f"laconic profile {typed} --batch 32{options}"
        said = []
        for words in (arguments, command.split()[1:], arguments):
            with pytest.raises(SystemExit):
                main(words)
            said.append(capsys.readouterr().out)
        assert f"(`{command}` measures them)" in said[0]
        assert f"kept in {devices.kept_in()}, delete it to measure anew" in said[0]
        assert "kept for plans of 32 samples a machine" in said[1]
        assert "layer times: measured here" in said[2]
    with pytest.raises(BadInput, match="has no 'nett'; did you mean 'net'"):
        subject("typed_model:nett")


def test_what_was_measured_elsewhere_is_measured_again(tmp_path: Path, idle: None, one_thread: None) -> None:
    chosen, counted = subject("digits-cnn"), cost("digits-cnn", 4)
    found = work.measure(chosen, counted, tmp_path)
    assert found.source == "measured here"
    assert len(found.layers) == len(counted.layers)
    assert found.forward_s > 0 < found.backward_s
    assert work.known(counted, tmp_path) == found
    assert work.known(cost("digits-cnn", 5), tmp_path) is None  # another shape
    (folder,) = tmp_path.glob("planner-*")
    elsewhere = folder.rename(tmp_path / "planner-another-machine")
    assert work.known(counted, tmp_path) is None
    elsewhere.rename(folder)
    assert work.known(counted, tmp_path) == found
    for file in folder.iterdir():
        file.write_text("{")
    assert work.known(counted, tmp_path) is None


def test_this_machine_is_measured_once(tmp_path: Path, idle: None) -> None:
    first = devices.here(tmp_path)
    devices._measured.cache_clear()
    assert devices.here(tmp_path) == first
    assert 1e8 < first.macs_per_s < 1e14
    with pytest.raises(UnknownName):
        devices.device("k2000")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a model"),
        (["lenet", "--link", "1gbyte"], "should be a number"),
        (["lenet", "--memory", "8 apples"], "should be a number"),
        (["lenet", "-n", "0"], "-n is from 1"),
        (["lenet", "-n", "16", "--per-host", "8"], "--per-host 8 changes nothing without --between"),
        (["lenet", "--quality", "best"], "unknown quality"),
        (["lenet", "--device-profile", "h1000"], "unknown device"),
        (["lenet", "--device-profile", "v100", "--memory", "1kB"], "no plan for 'lenet' fits"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def test_the_command_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    with pytest.raises(SystemExit) as ended:
        main(["plan", "vgg16", "-n", "8", "--device-profile", "p100", "--memory", "64GB", "--html", str(page),
              "-o", str(file), "--scale"])  # fmt: skip
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "one machine" in text
    assert "DDP × 8" in text
    assert text.count("→ ") == 1  # one is recommended
    assert "from 2 ranks on" in text
    assert Plan.from_json(file.read_text()).model == "vgg16"
    html = page.read_text()
    assert html.count("<svg") == 12
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@pytest.mark.parametrize("model", ["vgg16", "alexnet"])
def test_every_timeline_ends_with_its_step(model: str, tmp_path: Path) -> None:
    """What the ranks of a replica send each other is on it, too: half of a step of vgg16 with divided dense layers."""
    found = plan(model, Asked(16, "1gbit,50us", device="v100", memory_nbytes=10**12), tmp_path)
    assert {each.strategy.kind for each in found.candidates} >= {"data", "tensor", "pipeline", "hybrid"}
    for each in [*found.candidates, found.one]:
        assert max(bar.end_s for bar in each.timeline if bar.lane == "compute") == pytest.approx(each.seconds)
        assert min(bar.begin_s for bar in each.timeline) == 0.0
        assert all(bar.begin_s <= bar.end_s for bar in each.timeline)


def test_a_growing_batch_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan("digits-mlp", Asked(2, "100gbit,1us", device="xeon-core"), tmp_path)
    assert planned.ddp is not None
    planned = replace(planned, chosen=planned.ddp)
    grown, constant = phases(planned, Grow(256)), phases(planned, CONSTANT)
    assert [(each.epochs, each.batch, each.steps) for each in constant] == [(20, 64, 20 * 23)]
    assert sum(each.epochs for each in grown) == 20
    assert totals(grown)[0] < totals(constant)[0]
    assert totals(grown)[2] / totals(constant)[2] == pytest.approx(totals(grown)[0] / totals(constant)[0])
    with pytest.raises(BadInput, match="neither data nor epochs"):
        phases(plan("lenet", Asked(2, device="v100"), tmp_path), CONSTANT)
    with pytest.raises(SystemExit):
        main(["plan", "digits-mlp", "-n", "2", "--device-profile", "v100", "--batch-schedule", "grow(256)"])
    assert "instead of 460" in capsys.readouterr().out


def test_a_copy_on_the_meta_device_needs_no_memory() -> None:
    assert all(p.is_meta for p in subject(torch.nn.Linear(3, 3), (3,)).model("meta").parameters())


@pytest.mark.parametrize("mode", ["local", "local(8)", "local(period=8)", "local(8, state=forget)", "diloco(8)"])
def test_the_period_of_a_mode_however_it_is_written(mode: str) -> None:
    found = block_mode(mode)
    assert found is not None
    assert found.period == 8
    assert block_mode("sync") is block_mode("once") is None


def test_a_fragment_that_a_delay_does_not_hide_is_waited_for() -> None:
    """Four layers of 1 M values on 2 ranks, 0.13 s of computing a step; 32 Mbit/s and no latency."""
    setting = made(Link(0.0, 8 / 32e6))
    computing = 4 * 0.03 + 0.01
    whole_s = 4 * 4_000_000 * 8 / 32e6  # float32, once to the other rank and back in halves: 4 s
    blocking = predict(setting, Strategy(data=2, consistency="diloco(20)"))
    assert blocking.compute_s == pytest.approx(computing)
    assert blocking.exposed_s == pytest.approx(whole_s / 20)
    assert blocking.utilisation == pytest.approx(computing / (computing + whole_s / 20))
    assert blocking.sent_nbytes == pytest.approx(4 * 4_000_000 / 20)
    assert predict(setting, Strategy(data=2, consistency="local(20)")).seconds == pytest.approx(blocking.seconds)
    late = predict(setting, Strategy(data=2, consistency="diloco(20, fragments=4, delay=4, mix=0.5)"))
    assert late.exposed_s == pytest.approx(4 / 20 * (whole_s / 4 - 4 * computing))
    assert late.sent_nbytes == pytest.approx(blocking.sent_nbytes)
    hidden = predict(setting, Strategy(data=2, consistency="diloco(40, fragments=4, delay=9)"))
    assert hidden.exposed_s == 0.0
    assert hidden.utilisation == pytest.approx(1.0)


def test_a_codec_on_the_core_that_computes_is_not_hidden() -> None:
    """dynamic8 takes 2 ns to encode and 1 ns to decode a value: on another core, that is part of the way."""
    shared = made(Link(0.0, 0.0))
    way = Strategy(data=2, codec="dynamic8", consistency="diloco(20, delay=1)")
    found = shared.exchange("dynamic8", 4_000_000, 2)
    here, beside = predict(shared, way), predict(replace(shared, shares_core=False), way)
    assert here.processor_s == pytest.approx((found.encode_s + found.decode_s) / 20)
    assert here.exposed_s == beside.processor_s == beside.exposed_s == 0.0
    blocking = predict(replace(shared, shares_core=False), replace(way, consistency="diloco(20)"))
    assert blocking.exposed_s == pytest.approx((found.encode_s + found.decode_s) / 20)


def test_the_rate_that_a_utilisation_needs() -> None:
    """Half of the time computing: 0.13 s of waiting a step, so 2.6 s for 16 MB once in 20 steps."""
    setting, way = made(GBIT), Strategy(data=2, consistency="diloco(20)")
    needed = rate_needed(replace(setting, link=Link(0.0, 1.0)), way, 0.5)
    assert needed == pytest.approx(16e6 * 8 / 2.6, rel=2e-3)
    rates = [rate_needed(setting, way, share) for share in (0.5, 0.8, 0.95)]
    assert all(rate is not None and predict(setting.at_rate(rate), way).utilisation >= share
               for rate, share in zip(rates, (0.5, 0.8, 0.95), strict=True))  # fmt: skip
    assert rate_needed(replace(setting, link=Link(10.0, 1e-9)), way, 0.5) is None  # a second of latency a step
    sites = replace(setting, between=Link(0.0, 1.0), per_host=1)
    assert sites.at_rate(8e6).between == Link(0.0, 1e-6)
    assert sites.at_rate(8e6).link == setting.link


def test_modes_keep_vectors() -> None:
    setting = made()
    weights = 4 * setting.cost.total("parameters")
    sync, local, diloco, late = (
        predict(setting, Strategy(data=2, consistency=mode)).memory_nbytes
        for mode in ("sync", "local(8)", "diloco(8)", "diloco(8, fragments=2, delay=3)")
    )
    assert [local - sync, diloco - sync, late - sync] == pytest.approx([2 * weights, 3 * weights, 4 * weights])


class Tower(torch.nn.Module):
    """As many weights as a language model, in blocks of two dense layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(width, 6 * width), torch.nn.Linear(6 * width, width))
                  for _ in range(layers)]  # fmt: skip
        self.blocks = torch.nn.Sequential(torch.nn.Embedding(32_000, width), *blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(x)
        return found


def ten_billion() -> torch.nn.Module:
    return Tower(48, 4096)


def test_ten_billion_weights_on_sixteen_sites(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", f"{__name__}:ten_billion", "-n", "16", "--link", "500mbit,50ms", "--input-shape", "64"]
    arguments += ["--input-type", "int64", "--quality", "aggressive", "--device-profile", "h100", "--memory", "2000GB"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    apart = found["apart"]
    assert apart["strategy"]["consistency"].startswith("diloco(")
    assert 0 < apart["utilisation"] <= 1
    rates = [each["rate_bps"] for each in apart["rates_needed"]]
    assert rates == sorted(rates)
    assert "not predicted" in apart["loss"]
    with pytest.raises(SystemExit):
        main(arguments)
    said = capsys.readouterr().out
    assert "Training apart by data × 16" in said
    assert "The loss is not predicted." in said


def test_exact_plans_train_together(tmp_path: Path) -> None:
    assert plan("lenet", Asked(2, "1mbit,40ms", device="v100"), tmp_path).apart is None
    far = plan("lenet", Asked(2, "1mbit,40ms", device="v100", quality="aggressive"), tmp_path)
    assert far.apart is not None
    assert far.plan().configuration.startswith(("distribute:", "single"))
