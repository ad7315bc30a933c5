"""The loop: retries, rules, weights, ranks, storages, and kills at any moment."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

import laconic
from laconic.errors import BadInput, LaconicError, RecordError, StorageError, UnknownName
from laconic.searching import owners
from laconic.searching.spec import SearchSpec
from laconic.searching.storage import opened_study
from laconic.searching.trial import Trial
from laconic.storage.run_folders import only_one
from tests.searching.objectives import CHOICES, MIXED, curve, dies_at_first, inherits, lines, on_ranks, score, strange

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_a_process_that_dies_fails_its_trial_which_is_tried_again(tmp_path: Path) -> None:
    found = laconic.search(dies_at_first, MIXED, "random", 7, parallel=2, folder=tmp_path / "run")
    trials = list(found.history.trials.values())
    failed = [trial for trial in trials if trial.state == "failed"]
    assert failed
    assert all(trial.why == "its process was killed by SIGKILL" for trial in failed)
    assert sum(trial.state == "done" for trial in trials) == 7
    retried = {trial.proposal.notes.get("retry_of"): trial for trial in trials}
    assert all(retried[trial.number].point == trial.point for trial in failed)


@pytest.mark.processes
def test_all_ranks_of_a_trial_agree_and_one_that_dies_fails_it_alone(tmp_path: Path) -> None:
    found = laconic.search(
        on_ranks, "b = choice([1, 2, 3])", "grid", 3, parallel=1, workers=2, retries=0, folder=tmp_path / "run"
    )
    assert [trial.state for trial in found.history.trials.values()] == ["done", "done", "failed"]
    assert found.value == 2.0
    assert "rank 1 was killed by SIGKILL" in str(found.history.trials[2].why)


@pytest.mark.parametrize("rule", ["median(2)", "halving(2)", "hyperband(20)", "learning_curve(19)"])
def test_rules_stop_what_is_worse_and_leave_the_best(rule: str, tmp_path: Path) -> None:
    found = laconic.search(curve, "level = float(0, 1)", "sobol", 24, rule=rule, folder=tmp_path / "run")
    states = [trial.state for trial in found.history.trials.values()]
    assert "stopped" in states
    assert found.best is not None
    assert found.best.state == "done"
    assert found.params["level"] > 0.9


def test_hyperband_follows_from_the_seed(tmp_path: Path) -> None:
    """Optuna divides trials among brackets by the study's name, which it draws unless it is given."""
    states = [
        [trial.state for trial in laconic.search(curve, "level = float(0, 1)", "random", 12, rule="hyperband(20)",
                                                 folder=tmp_path / str(number)).history.trials.values()]
        for number in range(4)
    ]  # fmt: skip
    assert states[1:] == states[:1] * 3


@pytest.mark.parametrize(
    "options",
    [{"rule": rule} for rule in ("halving(reduction=1)", "halving(least=0)", "median(-1)", "hyperband(reduction=1)")]
    + [{"method": f"learning_curve(points={points})"} for points in ("pbt", "enas", "learning_curve(9)")]
    + [{"limit_s": 1.0}],
)
def test_what_cannot_work_is_refused_before_the_first_trial(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        laconic.search(curve, "level = float(0, 1)", trials=3, folder=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_weights_pass_from_trial_to_trial(tmp_path: Path) -> None:
    for method in ("pbt(4)", "pbt(4, sync=true)", "enas", "gradient_free(3)"):
        found = laconic.search(inherits, CHOICES, method, 20, folder=tmp_path / method[:12].replace("(", ""))
        trials = found.history.trials
        for trial in trials.values():
            parent = trial.proposal.parent
            assert trial.score == (0.0 if parent is None else trials[parent].score + 1)  # type: ignore[operator]
        assert found.value >= 2


def test_a_missing_objective_space_storage_or_record_is_one_sentence(tmp_path: Path) -> None:
    for call, kind, said in (
        (lambda: laconic.search(score, None, "random", 3), BadInput, "name a space"),
        (lambda: laconic.search(score, CHOICES, "rnadom", 3), UnknownName, "did you mean 'random'"),
        (lambda: laconic.search(score, CHOICES, trails=3, folder=tmp_path), UnknownName, "trials"),
        (lambda: laconic.search(score, CHOICES, "random", 0, folder=tmp_path), BadInput, "trials is a whole number"),
        (lambda: laconic.search(score, CHOICES, rule="never", folder=tmp_path), UnknownName, "learning_curve"),
        (lambda: laconic.search(score, CHOICES, storage="postgresql://localhost:1/no", folder=tmp_path), BadInput,
         "cannot be reached"),
        (lambda: laconic.searching.resume(tmp_path / "nowhere"), RecordError, "holds no search"),
        (lambda: laconic.search("no.module:function", CHOICES, folder=tmp_path), BadInput, "cannot be imported"),
        (lambda: laconic.search("digits-mlp", "speed = float(0, 1)", folder=tmp_path), BadInput, "nothing reads"),
        (lambda: laconic.search(lambda trial: 0.0, CHOICES, parallel=1, folder=tmp_path), BadInput, "parallel=0"),
    ):  # fmt: skip
        with pytest.raises(kind, match=said):
            call()


def test_a_search_that_is_stopped_while_its_processes_start_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("laconic.searching.pool.start_fork_server", stopped)
    with pytest.raises(KeyboardInterrupt):
        laconic.search(score, CHOICES, "random", 3, parallel=1, folder=tmp_path / "run")
    found = laconic.searching.load(tmp_path / "run")
    assert (found.spec.trials, len(found.history)) == (3, 0)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written: Not a directory; no search was touched"):
        laconic.search(score, CHOICES, "random", 3, folder=tmp_path / "file" / "run")


def test_a_point_that_failed_is_known_before_and_after_a_resume(tmp_path: Path) -> None:
    def fails_at_two(trial: Trial) -> float:
        if trial.params["b"] == 2:
            raise ValueError("on purpose")
        return 1.0

    space = "b = choice([1, 2, 3, 4])"
    laconic.search(fails_at_two, space, "grid", 2, folder=tmp_path / "run")
    found = laconic.search(fails_at_two, space, "grid", 9, folder=tmp_path / "run")
    assert [trial.point["b"] for trial in found.history.trials.values()] == [1, 2, 2, 3, 4]


def test_a_trial_that_fails_costs_no_point_that_the_search_begins_with(tmp_path: Path) -> None:
    def fails_at_first(trial: Trial) -> float:
        if trial.number == 0:
            raise ValueError("on purpose")
        return 1.0

    start = ({"b": 1}, {"b": 4})
    found = laconic.search(fails_at_first, "b = int(1, 99)", "random", 3, start=start, folder=tmp_path / "run")
    assert [trial.point["b"] for trial in found.history.trials.values()][:3] == [1, 1, 4]


def test_a_folder_keeps_its_search(tmp_path: Path) -> None:
    """Neither another search nor one that comes while it runs takes its place."""
    laconic.search(score, CHOICES, "random", 3, folder=tmp_path / "run")
    for space, method in ((MIXED, "random"), (CHOICES, "pbt")):
        with pytest.raises(BadInput, match=r"another (space|method).*name another folder"):
            laconic.search(score, space, method, 9, folder=tmp_path / "run")
    with only_one(tmp_path / "run"), pytest.raises(BadInput, match="still running"):
        laconic.search(score, CHOICES, "random", 9, folder=tmp_path / "run")
    assert SearchSpec.load(tmp_path / "run").trials == 3
    assert len(laconic.search(score, CHOICES, "random", 5, folder=tmp_path / "run").history) == 5


def test_a_search_in_which_all_fails_gives_up(tmp_path: Path) -> None:
    with pytest.raises(LaconicError, match="the last 4 trials failed, the last one because: KeyError"):
        laconic.search(lambda trial: trial.params["no"], CHOICES, "random", 30, give_up=4, folder=tmp_path / "run")


@pytest.mark.processes
def test_two_processes_that_share_a_search_try_no_point_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ask for the same next point of a grid; the storage's numbers say whose it is."""
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    code = ("import sys, laconic.searching; from tests.searching.objectives import CHOICES, slow;"
            "laconic.search(slow, CHOICES, 'grid', 18, storage=sys.argv[1], folder=sys.argv[2])")  # fmt: skip
    command = [sys.executable, "-c", code, f"journal://{tmp_path}/shared.log", str(tmp_path / "run")]
    both = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    points = [line.partition(" ")[2] for line in lines(tmp_path / "counted")]
    assert len(points) == len(set(points)) == 18
    owners = {trial.owner for trial in laconic.searching.load(tmp_path / "run").history.trials.values()}
    assert len(owners) <= 2


def test_a_process_says_that_it_lives_while_it_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or another machine would take a long trial back, and its result would be lost."""
    monkeypatch.setattr(owners, "BEAT_S", 0.02)
    journal, beats = tmp_path / "shared.log", []

    def evaluated(trial: Trial) -> float:
        before = journal.read_text().count('"beat ')
        deadline = time.monotonic() + 30
        while journal.read_text().count('"beat ') < before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        beats.append(journal.read_text().count('"beat ') - before)
        return 1.0

    laconic.search(evaluated, CHOICES, "random", 1, storage=f"journal://{journal}", folder=tmp_path / "run")
    assert beats[0] >= 2


def test_a_trial_that_another_process_took_back_is_not_done_here_either(tmp_path: Path) -> None:
    """Its reports and its value come too late, and it is asked to end; what is noted and returned is what is kept."""
    address, noted, answers = f"journal://{tmp_path}/shared.log", [], []

    def evaluated(trial: Trial) -> float:
        if not answers:
            with opened_study(address, "run", True) as other:
                other.tell(trial.number, state=TrialState.FAIL)
            answers.append(trial.report(0.5, 1))
        return 1.0

    found = laconic.search(evaluated, CHOICES, "random", 1, storage=address, retries=0, folder=tmp_path / "run",
                           note=lambda trial, spec: noted.append(trial))  # fmt: skip
    assert answers == [True]
    assert [trial.state for trial in noted] == ["failed"]
    for history in (found.history, laconic.searching.load(tmp_path / "run").history):
        assert [(trial.state, trial.reports) for trial in history.trials.values()] == [("failed", {})]


def test_a_torn_line_of_the_journal_is_cut_off(tmp_path: Path) -> None:
    laconic.search(score, CHOICES, "random", 5, folder=tmp_path / "run")
    with (tmp_path / "run" / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    assert len(laconic.searching.resume(tmp_path / "run", score, trials=8).history) == 8


def test_a_line_that_a_killed_process_tore_spoils_no_line_of_those_who_go_on(tmp_path: Path) -> None:
    def evaluated(trial: Trial) -> float:
        with (tmp_path / "run" / "journal.log").open("ab") as file:
            file.write(b'{"op_code": 4, "wor')
        return 1.0

    laconic.search(evaluated, CHOICES, "random", 3, folder=tmp_path / "run")
    assert len(laconic.searching.load(tmp_path / "run").history.ended) == 3


def test_a_damaged_journal_is_said_to_be_damaged(tmp_path: Path) -> None:
    laconic.search(score, CHOICES, "random", 3, folder=tmp_path / "run")
    journal = tmp_path / "run" / "journal.log"
    whole = journal.read_bytes().splitlines(keepends=True)
    for line in (whole[2][:9] + b"\x80" + whole[2][9:], b"[]\n", b'{"op_code": 4, "worker_id": "x"}\n'):
        journal.write_bytes(b"".join([*whole[:2], line, *whole[3:]]))
        with pytest.raises(RecordError, match=r"journal.log is damaged in line 3 .*: put a copy of it back"):
            laconic.searching.load(tmp_path / "run")


@pytest.mark.parametrize("after", [None, "", "another"])
def test_a_journal_that_is_deleted_under_way_is_one_sentence(after: str | None, tmp_path: Path) -> None:
    def evaluated(trial: Trial) -> float:
        if trial.number == 2:
            (tmp_path / "run" / "journal.log").unlink()
            if after is not None:
                (tmp_path / "run" / "journal.log").write_text(after)
        return 1.0

    with pytest.raises(StorageError, match="was deleted or replaced while the search used it"):
        laconic.search(evaluated, CHOICES, "random", 5, folder=tmp_path / "run")


@pytest.mark.timeout(60)
def test_a_lock_that_cannot_be_had_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with opened_study(str(tmp_path / "journal.log"), "run", True) as study:
        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", refused)
            with pytest.raises(StorageError, match="No locks available"):
                study.set_user_attr("first", 1)
        study.set_user_attr("second", 2)
        assert study.user_attrs == {"second": 2}


def test_a_study_that_looks_the_other_way_is_refused(tmp_path: Path) -> None:
    storage = f"journal://{tmp_path}/shared.log"
    laconic.search(score, CHOICES, "random", 2, storage=storage, folder=tmp_path / "one" / "run")
    with pytest.raises(BadInput, match="does not minimize: name another folder"):
        laconic.search(score, CHOICES, "random", 2, storage=storage, folder=tmp_path / "two" / "run", maximize=False)


@pytest.mark.processes
def test_what_no_float_holds_and_no_pipe_takes_fails_its_trial_alone(tmp_path: Path) -> None:
    found = laconic.search(strange, "b = int(0, 3)", "grid", 4, parallel=1, retries=0, folder=tmp_path / "run")
    assert [trial.why for trial in found.history.trials.values()] == [
        "the objective returned a number that no float can hold", "the objective returned function, not a number",
        "the objective returned Unwilling, not a number", None,
    ]  # fmt: skip
    here = laconic.search(lambda trial: 10**400, CHOICES, "random", 2, retries=0, folder=tmp_path / "here")
    assert [trial.state for trial in here.history.trials.values()] == ["failed"] * 2


@pytest.mark.processes
def test_a_long_temporary_folder_does_not_keep_processes_from_starting(tmp_path: Path) -> None:
    """The path of a fork server's socket would be too long."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    code = ("import sys, laconic.searching; from tests.searching.objectives import CHOICES, score\n"
            "if __name__ == '__main__':\n"
            "    found = laconic.search(score, CHOICES, 'random', 2, parallel=1, retries=0, folder=sys.argv[1])\n"
            "    sys.exit(found.best is None)\n")  # fmt: skip
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "TMPDIR": str(long), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ended = subprocess.run([sys.executable, script, tmp_path / "run"], env=environment, timeout=200, check=False,
                           capture_output=True, text=True)  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_the_door_loads_no_more_than_it_needs() -> None:
    code = "import sys, laconic; laconic.search; print(sum(name.split('.')[0] == 'laconic' for name in sys.modules))"
    loaded = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT).stdout)
    assert loaded <= 110


def _wait_for_port(port: int, longest_s: float = 60.0) -> None:
    end = time.monotonic() + longest_s
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"nobody listens on port {port} after {longest_s:g} s")


@pytest.mark.processes
def test_optunas_proxy_serves_a_search(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    journal = tmp_path / "served.log"
    code = ("from optuna.storages import run_grpc_proxy_server; from laconic.searching.storage import open_storage;"
            f"run_grpc_proxy_server(open_storage({str(journal)!r}), host='127.0.0.1', port={port})")  # fmt: skip
    server = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        found = laconic.search(score, CHOICES, "random", 8, storage=f"grpc://127.0.0.1:{port}", folder=tmp_path / "run")
        assert len(found.history) == 8
        assert journal.stat().st_size > 0
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
