"""The chaos suite can fail: a hang, an untyped error and a wrong model each count in their column, and end in 1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import chaos, readers, table
from benchmarks.chaos.faults import all_faults
from benchmarks.chaos.faults.signals import Kill
from benchmarks.chaos.judge import HUNG, LOST, SKIPPED, SURVIVED, WRONG, Verdict, judge
from benchmarks.chaos.launch import Ending
from benchmarks.chaos.promises import EITHER, END, GO_ON, Promise, in_words, of_loss
from benchmarks.chaos.scenario import ENGINES, Scenario, modes_of, scenarios
from benchmarks.chaos.stage import Stage
from laconic import consistency
from laconic.consistency.base import REGISTRY
from tests.benchmarks.chaos import planted


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setitem(REGISTRY._entries, "planted", planted.Planted)
    made = Stage(planted.run, timeout_s=4.0, grace_s=2.0)
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("defect", "column"),
    [("honest", SURVIVED), ("hang", HUNG), ("untyped", LOST), ("wrong", WRONG)],
)
def test_a_planted_defect_is_counted_in_its_column(defect: str, column: str, stage: Stage) -> None:
    """Real processes, of which one is killed."""
    scenario = Scenario("kill", "gloo", f"planted({defect})", "none", "step", seed=1, number=0)
    verdict = Kill().play(scenario, stage)
    assert verdict.column == column, verdict


@pytest.mark.processes
def test_ranks_that_end_with_different_weights_are_wrong_without_any_fault(stage: Stage) -> None:
    with pytest.raises(Exception, match="different weights"):
        stage.clean(Scenario("kill", "zmq", "planted(apart)", "none", "step", seed=1, number=0))


FINE = Ending(0, "finished", digest=7)
LOST_PEER = Ending(0, "error", "PeerLost", "[rank 0/3] ring: peer 2 was lost", typed=True, peer=2)
CASES = [
    (Promise(GO_ON), FINE, SURVIVED),
    (Promise(GO_ON, digest=7), FINE, SURVIVED),
    (Promise(GO_ON, digest=8), FINE, WRONG),
    (Promise(GO_ON), Ending(0, "finished", digest=7, finite=False), WRONG),
    (Promise(GO_ON), Ending(0, "waits"), HUNG),
    (Promise(GO_ON), LOST_PEER, LOST),
    (Promise(END, names=2), LOST_PEER, SURVIVED),
    (Promise(END, names=1), LOST_PEER, LOST),
    (Promise(END), FINE, WRONG),
    (Promise(EITHER), FINE, SURVIVED),
    (Promise(END), Ending(0, "error", "KeyError", "'peer'"), LOST),
    (Promise(END), Ending(0, "died"), LOST),
    (Promise(END, launcher_ends=True), Ending(0, "died"), SURVIVED),
]


@pytest.mark.parametrize(("promise", "ending", "column"), CASES)
def test_the_judge_calls_every_end_by_its_name(promise: Promise, ending: Ending, column: str) -> None:
    assert judge(promise, [ending], victim=2).column == column


def test_ranks_that_finish_apart_are_wrong_and_the_victim_counts_too() -> None:
    others = [Ending(0, "finished", digest=7), Ending(1, "finished", digest=7)]
    assert judge(Promise(GO_ON, EITHER), [*others, Ending(2, "finished", digest=8)], victim=2).column == WRONG
    assert judge(Promise(GO_ON, EITHER), [*others, Ending(2, "waits")], victim=2).column == HUNG
    assert judge(Promise(GO_ON, EITHER), [*others, Ending(2, "error", typed=True)], victim=2).column == SURVIVED


def test_the_promise_is_what_the_mode_declares() -> None:
    assert of_loss("sync", "gloo", 1, 3, "step").others == END
    assert of_loss("sync(drop_slowest=1)", "gloo", 1, 3, "step").others == GO_ON
    assert of_loss("sync(drop_slowest=1)", "gloo", 0, 3, "step").others == END  # it sums
    assert of_loss("sync(drop_slowest=1)", "mpi", 1, 3, "step").launcher_ends


def test_the_page_says_what_every_mode_declares() -> None:
    page = (Path(__file__).parents[3] / "docs" / "faults.md").read_text()
    for spec in modes_of("gloo"):
        assert in_words(spec) in page, f"docs/faults.md has not the row {in_words(spec)}"


@pytest.mark.parametrize("column", [HUNG, LOST, WRONG])
def test_a_missing_zero_is_not_well_and_is_printed(column: str) -> None:
    scenario = next(scenarios("kill", ["gloo"], ["step"], seed=1))
    fine = [table.Result(scenario, Verdict(SURVIVED), 1.0)]
    bad = [*fine, table.Result(scenario, Verdict(column, "planted"), 1.0)]
    assert table.is_well(fine, {}, ["kill"])
    assert not table.is_well(bad, {}, ["kill"])
    assert "planted" in table.text(bad, {})
    assert table.as_json(bad, {})["table"][0][column] == 1


def test_a_fault_that_was_never_injected_needs_a_reason() -> None:
    scenario = next(scenarios("kill", ["gloo"], ["step"], seed=1))
    skipped = [table.Result(scenario, Verdict(SKIPPED, "no codec"), 1.0)]
    assert not table.is_well(skipped, {}, ["kill"])
    assert table.is_well([], {"kill": "not on this system"}, ["kill"])


def test_every_engine_goes_through_every_registered_mode_in_an_order_given_by_the_seed() -> None:
    for fault in all_faults():
        order = scenarios(fault.name, fault.engines, fault.moments, seed=3)
        most = max(len(modes_of(engine)) for engine in fault.engines)
        drawn = list(itertools.islice(order, most * len(fault.engines)))
        assert drawn == list(itertools.islice(scenarios(fault.name, fault.engines, fault.moments, 3), len(drawn)))
        for engine in fault.engines:
            assert {each.mode for each in drawn if each.engine == engine} == set(modes_of(engine))
    everyone = {spec for name in consistency.names() for spec in consistency.get(name).examples}
    assert everyone <= set(modes_of("gloo"))
    assert set(ENGINES) == {"gloo", "zmq", "threads", "mpi", "elastic"}


def test_nothing_is_done_to_a_thread_that_makes_no_steps() -> None:
    """It heeds what is done to it between two steps: number 87 was taken for a loss that nobody noticed."""
    first = Scenario("kill", "threads", "async(servers=1)", "entropy", "step", seed=1, number=87)
    assert first.victim == int(first.chance.random() * 2)
    numbered = [replace(first, number=number) for number in range(50)]
    assert {each.victim for each in numbered} == {0, 1}
    assert {replace(each, engine="gloo").victim for each in numbered} == {0, 1, 2}


def test_every_kind_of_file_refuses_damage_or_reads_as_it_was_written() -> None:
    for kind in readers.KINDS[:-1]:  # payloads have a suite of their own
        assert readers.run(kind, "7") == {"wrong": [], "lost": []}, kind


def test_the_command_ends_with_1_where_a_zero_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Planted:
        name, engines, moments = "planted", ("gloo",), ("step",)

        def absent(self) -> str:
            return ""

        def play(self, scenario: Scenario, stage: Stage) -> Verdict:
            return Verdict(WRONG if scenario.number == 3 else SURVIVED, "planted")

    monkeypatch.setattr(chaos, "all_faults", lambda: [Planted()])
    monkeypatch.setattr(chaos, "warm", lambda: None)
    output = tmp_path / "chaos.json"
    assert chaos.main(["--number", "2", "--lanes", "1", "--output", str(output)]) == 0
    assert chaos.main(["--number", "3", "--lanes", "1"]) == 1
    assert "WRONG: planted: " in capsys.readouterr().out
    assert output.exists()
