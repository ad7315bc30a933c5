"""The chaos suite can fail: a hang, an untyped error and a wrong model each count in their column, and end in 1."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import chaos, readers, table
from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.doors.anywhere import PLACES, WAYS, parsed
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.faults import all_faults, meeting
from benchmarks.chaos.faults.damage import forge
from benchmarks.chaos.faults.raising import Raise
from benchmarks.chaos.faults.signals import Kill
from benchmarks.chaos.judge import HUNG, LOST, SKIPPED, SURVIVED, WRONG, Verdict, judge
from benchmarks.chaos.launch import Ending
from benchmarks.chaos.meetings import AWAY
from benchmarks.chaos.promises import EITHER, END, GO_ON, RAISE, Promise, in_words, of_loss
from benchmarks.chaos.scenario import FILES, Scenario, places, scenarios
from benchmarks.chaos.stage import Skipped, Stage
from laconic import consistency
from laconic.consistency.base import REGISTRY
from laconic.storage import tree
from tests.benchmarks.chaos import planted

KILL = Scenario("kill", "distribute", "gloo", "sync", "none", "batch", 2, seed=1, number=0)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setitem(REGISTRY._entries, "planted", planted.Planted)
    made = Stage(planted.run, timeout_s=4.0, grace_s=7.0)
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("defect", "column"),
    [("honest", SURVIVED), ("hang", HUNG), ("untyped", LOST), ("wrong", WRONG)],
)
def test_a_planted_defect_is_counted_in_its_column(defect: str, column: str, stage: Stage) -> None:
    """Real processes, of which one is killed."""
    verdict = Kill().play(replace(KILL, case=f"planted({defect})"), stage)
    assert verdict.column == column, verdict


@pytest.mark.processes
def test_ranks_that_end_with_different_weights_are_wrong_without_any_fault(stage: Stage) -> None:
    with pytest.raises(Exception, match="different weights"):
        stage.clean(replace(KILL, engine="zmq", case="planted(apart)"))


@pytest.mark.processes
@pytest.mark.parametrize("phase", ["encode", "wire", "decode", "optimiser", "evaluation", "backward"])
def test_a_rank_is_killed_at_the_named_phase(phase: str, stage: Stage) -> None:
    """Several buckets are under way; the trap is found in the victim's notes, else the scenario would be skipped."""
    scenario = replace(KILL, codec="dynamic8", phase=phase)
    assert Kill().play(scenario, stage) == Verdict(SURVIVED)


@pytest.mark.processes
def test_a_job_killed_while_it_saves_goes_on_to_the_same_bits(stage: Stage) -> None:
    assert Kill().play(replace(KILL, codec="topk(0.1)", phase="checkpoint"), stage) == Verdict(SURVIVED)


@pytest.mark.processes
def test_a_phase_that_a_job_does_not_pass_is_skipped_and_never_counted(stage: Stage) -> None:
    with pytest.raises(Skipped, match="does not pass the phase journal"):
        Kill().play(replace(KILL, phase="journal"), stage)


@pytest.mark.processes
def test_the_error_of_a_users_own_code_stays_its_own(stage: Stage) -> None:
    assert Raise().play(replace(KILL, fault="raise", phase="forward"), stage) == Verdict(SURVIVED)


FINE = Ending(0, "finished", digest=7)
LOST_PEER = Ending(0, "error", "PeerLost", "[rank 0/3] ring: peer 2 was lost", typed=True, peer=2)
OWN_ERROR = Ending(2, "error", "UserError", "on purpose")
CASES = [
    (Promise(GO_ON), FINE, SURVIVED),
    (Promise(GO_ON, digests={0: 7}), FINE, SURVIVED),
    (Promise(GO_ON, digests={0: 8}), FINE, WRONG),
    (Promise(GO_ON), Ending(0, "finished", digest=7, finite=False), WRONG),
    (Promise(GO_ON), Ending(0, "waits"), HUNG),
    (Promise(GO_ON), LOST_PEER, LOST),
    (Promise(END, names=frozenset({2})), LOST_PEER, SURVIVED),
    (Promise(END, names=frozenset({1, 2})), LOST_PEER, SURVIVED),
    (Promise(END, names=frozenset({1})), LOST_PEER, LOST),
    (Promise(END), FINE, WRONG),
    (Promise(EITHER), FINE, SURVIVED),
    (Promise(END), Ending(0, "error", "KeyError", "'peer'"), LOST),
    (Promise(END), Ending(0, "error", "RuntimeError", "gloo"), LOST),
    (Promise(END, foreign=True), Ending(0, "error", "RuntimeError", "gloo"), SURVIVED),
    (Promise(END), Ending(0, "died"), LOST),
    (Promise(END, launcher_ends=True), Ending(0, "died"), SURVIVED),
    (Promise(END, RAISE), OWN_ERROR, SURVIVED),
    (Promise(END, RAISE), replace(LOST_PEER, rank=2), LOST),
    (Promise(END, RAISE), replace(FINE, rank=2), WRONG),
]


@pytest.mark.parametrize(("promise", "ending", "column"), CASES)
def test_the_judge_calls_every_end_by_its_name(promise: Promise, ending: Ending, column: str) -> None:
    assert judge(promise, [ending], 2).column == column


def test_ranks_that_finish_apart_are_wrong_and_the_victim_counts_too() -> None:
    others = [Ending(0, "finished", digest=7), Ending(1, "finished", digest=7)]
    apart = [*others, Ending(2, "finished", digest=8)]
    assert judge(Promise(GO_ON, EITHER), apart, 2).column == WRONG
    assert judge(Promise(GO_ON, EITHER, alike=False), apart, 2).column == SURVIVED
    assert judge(Promise(GO_ON, EITHER), [*others, Ending(2, "waits")], 2).column == HUNG
    assert judge(Promise(GO_ON, EITHER), [*others, Ending(2, "error", typed=True)], 2).column == SURVIVED


def test_the_promise_is_what_the_mode_declares() -> None:
    loss = replace(KILL, ranks=3)
    dropping = replace(loss, case="sync(drop_slowest=1)")
    assert of_loss(loss, (1,)).others == END
    assert of_loss(dropping, (1,)).others == GO_ON
    assert of_loss(dropping, (0,)).others == END  # it sums
    assert of_loss(replace(dropping, engine="mpi"), (1,)).launcher_ends
    assert of_loss(loss, (1, 2)).names == {1, 2}


def test_the_page_says_what_every_mode_declares() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "faults.md").read_text()
    for case in DOORS["distribute"].cases("gloo"):
        if "overlap" not in case:
            assert in_words(case) in page, f"docs/reference/faults.md has not the row {in_words(case)}"


def test_the_page_shows_the_record() -> None:
    root = Path(__file__).parents[3]
    record = json.loads((root / "benchmarks" / "results" / "chaos.json").read_text())
    assert table.page(record) in (root / "docs" / "reference" / "faults.md").read_text()


@pytest.mark.parametrize("column", [HUNG, LOST, WRONG])
def test_a_missing_zero_is_not_well_and_is_printed(column: str) -> None:
    fine = [table.Result(KILL, Verdict(SURVIVED), 1.0)]
    bad = [*fine, table.Result(KILL, Verdict(column, "planted"), 1.0)]
    assert table.is_well(fine, {}, ["kill"])
    assert not table.is_well(bad, {}, ["kill"])
    assert "planted" in table.text(bad, {})
    assert table.as_json(bad, {})["table"][0][column] == 1
    assert [table.read(row) for row in table.as_json(bad, {})["scenarios"]] == bad


def test_a_fault_that_was_never_injected_needs_a_reason() -> None:
    skipped = [table.Result(KILL, Verdict(SKIPPED, "no codec"), 1.0)]
    assert not table.is_well(skipped, {}, ["kill"])
    assert table.is_well([], {"kill": "not on this system"}, ["kill"])


def test_every_fault_goes_through_every_door_engine_case_and_phase_in_an_order_given_by_the_seed() -> None:
    for fault in all_faults():
        turns = places(fault)
        most = max(len(DOORS[name].cases(engine)) for name, engine in turns if name != FILES)
        phases = max(len(fault.phases(DOORS[name])) for name, _ in turns if name != FILES)
        drawn = list(itertools.islice(scenarios(fault, 3), most * phases * len(turns)))
        assert drawn == list(itertools.islice(scenarios(fault, 3), len(drawn)))
        for name, engine in turns:
            mine = [each for each in drawn if (each.door, each.engine) == (name, engine)]
            cases = readers.KINDS if name == FILES else DOORS[name].cases(engine)
            assert {each.case for each in mine} == set(cases)
        if "compress" in fault.doors:
            met = {each.phase for each in drawn if each.door == "compress"}
            assert met == set(fault.phases(DOORS["compress"]))
            assert {each.ranks for each in drawn if each.door == "compress"} == {2, 3, 4}


def test_every_mode_is_a_case_of_distribute() -> None:
    everyone = {spec for name in consistency.names() for spec in consistency.get(name).examples}
    assert everyone <= set(DOORS["distribute"].cases("gloo"))
    assert set(DOORS) == {"compress", "distribute", "divide", "pipeline", "elastic", "anywhere", "search", "shrink"}


def test_nothing_is_done_to_a_rank_that_makes_no_steps() -> None:
    """Its phases would never come: a server's trap was taken for a loss that nobody noticed."""
    numbered = [replace(KILL, case="async(servers=1)", ranks=3, number=number) for number in range(50)]
    assert {each.victim for each in numbered} == {0, 1}
    assert {replace(each, phase="wire").victim for each in numbered} == {0, 1, 2}
    assert all(each.second != each.victim for each in numbered)


def test_meeting_places_and_members_are_lost_in_every_order() -> None:
    met = {
        (place, way, fault.name, deed, order)
        for fault in map(meeting.Meeting, ("", *AWAY))
        for each in itertools.islice(scenarios(fault, 1), 24 * len(meeting.deeds(fault.how)))
        for deed, order in [meeting.deed_of(each, fault.how)]
        for _, place, way in [parsed(each.case)]
    }
    assert {(deed, order) for _, _, name, deed, order in met if name == "churn"} == {
        (deed, "member first") for deed in meeting.MEMBERS
    }
    for name in ("place killed", "place stopped", "place cut"):
        for place in PLACES:
            mine = {(deed, order) for at, _, fault, deed, order in met if (at, fault) == (place, name)}
            assert mine == set(itertools.product(meeting.MEMBERS, meeting.ORDERS)), (name, place)
        assert {way for _, way, fault, *_ in met if fault == name} == set(WAYS)


@pytest.mark.parametrize("forges", [False, True])
def test_every_kind_of_file_refuses_damage_or_reads_as_it_was_written(forges: bool) -> None:
    for reader in readers.READERS:  # payloads and .lac files have suites of their own
        assert readers.run(reader.name, "7", forges) == {"wrong": [], "lost": []}, reader.name


def test_a_forged_checkpoint_has_a_checksum_that_fits(tmp_path: Path) -> None:
    """So that what is behind the checksum is reached."""
    whole = {"step": 3, "model": {"a": readers.STATE["weights"]}, "optimizer": {}}
    for seed in range(30):
        tree.write_file(tmp_path / "c.ckpt", whole)
        before = (tmp_path / "c.ckpt").read_bytes()
        forge(tmp_path / "c.ckpt", random.Random(seed))
        data = (tmp_path / "c.ckpt").read_bytes()
        assert data != before
        assert hashlib.sha256(data[40:]).digest() == data[8:40]


def test_the_command_ends_with_1_where_a_zero_is_missing_and_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[int] = []

    class Planted:
        name, doors, engines = "planted", ("distribute",), ("gloo",)

        def phases(self, door: Door) -> Sequence[str]:
            return ["batch"]

        def absent(self) -> str:
            return ""

        def play(self, scenario: Scenario, stage: Stage) -> Verdict:
            played.append(scenario.number)
            return Verdict(WRONG if scenario.number == 3 else SURVIVED, "planted")

    monkeypatch.setattr(chaos, "all_faults", lambda: [Planted()])
    monkeypatch.setattr(chaos, "warm", lambda: None)
    output = tmp_path / "chaos.json"
    words = ["--lanes", "1", "--output", str(output)]
    assert chaos.main([*words, "--number", "2"]) == 0
    assert chaos.main([*words, "--number", "2", "--resume"]) == 0
    assert played == [2]
    for _ in range(2):  # what failed is played again
        assert chaos.main([*words, "--number", "3", "--resume"]) == 1
    assert played == [2, 3, 3]
    assert len(json.loads(output.read_text())["again"]) == 1
    assert "WRONG: planted in batch: " in capsys.readouterr().out
    assert table.markdown(json.loads(output.read_text()), "fault").endswith("| all | 2 | 1 | 0 | 0 | 1 |")
