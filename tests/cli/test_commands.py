"""The commands as a user types them: JSON that parses, one sentence and exit code 2 for bad input."""

from __future__ import annotations

import inspect
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from laconic import cli, schedules, workloads
from laconic.cli import catalogue, main
from laconic.codecs import get as codec_class
from laconic.codecs import names as codec_names
from laconic.errors import UnknownName
from laconic_lab.commands import names
from laconic_lab.runs.strategies import PEERS


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:  # type: ignore[type-arg]
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "valid ones: bench, code, codecs"),
        (["code", "nothing"], "valid ones: analogies, classify, coarsen, embed, graph, map"),
        (["bench", "nothing"], "valid ones: codecs, collectives, memory, step"),
        (["schedule", "rign"], "did you mean 'ring'"),
        (["schedule", "ring", "--hosts", "2"], "unknown parameter of all_reduce by ring 'hosts'"),
        (["schedule", "ring", "-n", "0"], "world_size must be at least 1"),
        (["simulate", "allreduce", "--link", "fast"], "units bit, kbit"),
        (["simulate", "allreduce", "--link", "nowhere.json"], "no link profile at nowhere.json"),
        (["simulate", "allreduce", "--nbytes", "1e400"], "too large"),
        (["simulate", "allreduce", "--nbytes", "3"], "no whole number of values of 4 bytes"),
        (["simulate", "allreduce", "-n", "9000", "--hosts", "2"], "unknown parameter of all_reduce by ring 'hosts'"),
        (["schedule", "ring", "-n", "2000"], "too many to execute symbolically"),
        (["simulate", "dance"], "unknown collective 'dance'"),
        (["probe", "--engine", "pigeon"], "valid ones: gloo, mpi, nccl, zmq"),
        (["probe", "-n", "0"], "between 1 and 256"),
        (["bench", "collectives", "--numels", "many"], "expected numbers"),
        *[
            (["bench", *words.split()], f"{words.split()[-2]} must be at least 1, got {words.split()[-1]}")
            for words in ("memory --width 0", "memory --layers 0", "memory --ranks 0")
        ],
        *[
            (words.split(), f"{words.split()[-2]} must be at least 0, got {words.split()[-1]}")
            for words in (
                "bench step --seed -1", "code coarsen --seed -1",
                "shrink digits-mlp -o x.lac --seed -1", "shrink digits-mlp -o x.lac --budget nan",
                "train digits-mlp --tuning-runs -1",
            )
        ],
        *[
            (words.split(), f"{words.split()[-2]} must be above 0 and ")
            for words in (
                "bench collectives --seconds -1.0", "bench collectives --seconds inf", "cost digits-mlp --rate nan",
            )
        ],
        (["codecs", "topc"], "did you mean 'topk'"),
        (["report", "--bogus"], "unknown option '--bogus'"),
        (["bench", "step", "--linc", "1gbit"], "did you mean '--link'"),
        (["train"], "name a workload (cifar-cnn, "),
        (["demo", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["search", "digits-mlp", "--epochs", "-1"], "--epochs must be at least 1, got -1"),
        (["search", "digits-mlp", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    record = _json(capsys, "schedule", "ring", "-n", "4", "--numel", "10", "--json")
    assert (record["rounds"], record["sent_numel"], len(record["messages"])) == (6, 60, 24)


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "allreduce", "--algorithm", "rabenseifner", "-n", "65536"]
    words += ["--nbytes", "100MB", "--link", "10gbit,5us", "--json"]
    record = _json(capsys, *words)
    assert record["seconds"] == pytest.approx(record["closed_form_seconds"], rel=1e-5)
    assert record["seconds"] >= record["lower_bound_seconds"]
    assert (record["rounds"], record["messages"]) == (32, 2_097_152)


def test_what_is_too_large_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "build", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(SystemExit) as ended:
        main(["schedule", "ring", "-n", "2000"])
    assert ended.value.code == 2


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_the_closed_form_answers_where_there_are_too_many_messages(
    algorithm: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "build", lambda *_, **__: pytest.fail("built"))
    words = ["simulate", "allreduce", "--algorithm", algorithm, "-n", "65536"]
    record = _json(capsys, *words, "--json")
    assert record["seconds"] == record["closed_form_seconds"] > 0
    assert not record["simulated"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "8.6e+09 messages are too many to simulate" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", schedules.names("all_reduce"))
def test_the_closed_form_alone_is_that_of_the_simulation(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "allreduce", "--algorithm", algorithm, "-n", "8", "--nbytes", "64KB", "--json"]
    simulated, alone = _json(capsys, *words), _json(capsys, *words, "--closed-form")
    for column in ("closed_form_seconds", "rounds", "sent_nbytes", "nbytes", "link"):
        assert simulated[column] == alone[column]
    assert (simulated["simulated"], alone["simulated"]) == (True, False)


@pytest.mark.processes
def test_probe_then_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    profile = _json(capsys, "probe", "-n", "2", "--quick", "-o", str(path), "--json")
    assert profile["world_size"] == 2
    assert profile["tcp_window"].keys() == {"needed_nbytes", "limits", "connections", "sysctl"}
    record = _json(capsys, "simulate", "allreduce", "-n", "8", "--link", str(path), "--json")
    assert record["link"]["s_per_byte"] == profile["link"]["s_per_byte"]
    path.write_text("{")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "allreduce", "--link", str(path)])
    assert ended.value.code == 2


@pytest.mark.processes
def test_bench_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "collectives", "-n", "3", "--numels", "100,5e4", "--seconds", "0.1", "--quick-probe", "--json"]
    record = _json(capsys, *words)
    assert {"engine", "algorithm", "numel", "seconds", "predicted_seconds", "sent_nbytes", "rounds"} <= set(
        record["results"][0]
    )
    assert {row["algorithm"] for row in record["results"]} >= {"ring", "tree", "butterfly", "direct", "native"}
    assert [pick["numel"] for pick in record["auto"]] == [100, 50_000]


def test_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.key"
    with pytest.raises(SystemExit) as ended:
        main(["key", str(path)])
    assert ended.value.code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = path.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["key", str(path)])
    assert ended.value.code == 2
    assert path.read_bytes() == first


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("laconic ")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0), (["bench", "--help"], 0), (["--version"], 0), (["codecs"], 0), (["codecs", "--json"], 0),
        (["trian"], 2), (["train", "digits-mpl"], 2), (["compare", "digits-mpl", "-n", "2"], 2),
        (["train", "digits-mlp", "-n", "2", "--codec", "dynamc8"], 2),
        (["compare", "digits-mlp", "--configs", "ddp,topk(0.01)+qsdg(4)"], 2),
        (["train", "digits-mlp", "--codec", "topk(0.01, buckt=64)+qsgd(4)"], 2),
        (["compare", "digits-mlp", "--configs", "ddp,distribute:topk(0.01)+qsgd(bitz=4)@local(8)"], 2),
    ],
)  # fmt: skip
def test_lists_and_wrong_names_wait_for_no_import(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path))
    catalogue.catalogue()  # made once; what is asked for below is another process
    heavy = "[name for name in ('torch', 'numba', 'numpy', 'matplotlib') if name in sys.modules]"
    program = f"import atexit, sys; atexit.register(lambda: print('loaded', {heavy})); import laconic.cli as cli"
    program += f"; cli.main({words})"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert told.returncode == code, told.stderr
    assert ("did you mean" in told.stderr) == (code == 2)
    assert told.stdout.endswith("loaded []\n")


def test_the_catalogue_is_what_the_registries_know() -> None:
    known = catalogue.catalogue()
    assert known["workloads"] == workloads.names()
    assert set(names.PEERS) == set(PEERS)
    found = {entry["name"]: set(entry["options"]) for entry in known["codecs"]}
    assert found == {name: set(inspect.signature(codec_class(name)).parameters) for name in codec_names()}


def test_the_first_wrong_name_is_refused_by_the_registry_and_makes_the_catalogue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path))
    assert catalogue.kept() is None
    with pytest.raises(SystemExit):
        main(["train", "digits-mpl"])
    first = capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "laconic.workloads")
    with pytest.raises(UnknownName) as error:
        names.check(["train", "digits-mpl"])
    assert first == f"laconic: {error.value}\n"


@pytest.mark.parametrize(
    "name",
    [
        "ddp", "ddp-fp16,single", "auto", "dynamic8", "compress:none,distribute:dynamic8@local(8)",
        "topk(16, bucket=512)+qsgd(4),feedback=false", "elastic:dynamic8", "divide:none/dynamic8@stages(micro=8)",
        "divide:none@0=dense(output); 2=dense(input)", "none@ natural(rank=8)",
        "none@x((1, 2), other, more)", "", ",", "nothing of this form",
    ],
)  # fmt: skip
def test_what_is_no_wrong_name_is_left_to_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue.catalogue()
    monkeypatch.delitem(sys.modules, "laconic.workloads")
    names.check(["compare", "digits-mlp", "--configs", name])
    names.check(["train", "my.module:factory", "--codec", "my-own"])


def test_the_catalogue_is_made_anew_when_it_is_damaged_or_the_source_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    true = catalogue.catalogue()
    (kept,) = (tmp_path / "cache").glob("catalogue-*.json")
    kept.write_text(kept.read_text().replace("dynamic8", "dynamic9"))
    assert catalogue.catalogue() == true
    (tmp_path / "codecs").mkdir()
    (tmp_path / "codecs" / "new.py").write_text("")
    monkeypatch.setattr(catalogue, "PACKAGE", tmp_path)
    assert catalogue.catalogue() == true
    assert len(list((tmp_path / "cache").glob("catalogue-*.json"))) == 2


def test_the_list_says_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert "--version" in told
    assert "Train a workload" in told


def test_a_plan_loads_no_matplotlib_before_it_draws() -> None:
    """It takes longer to load than most plans to make."""
    code = "import sys, laconic_lab.commands.plan; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def _entries() -> list[tuple[str, str]]:
    """Every command's words and where its function is."""
    found = []
    for name, entry in cli._table([]).items():
        if isinstance(entry, str):
            found.append((name, entry))
        else:
            found += [(f"{name} {each}", where) for each, where in entry.commands.items()]
    return found


@pytest.mark.parametrize(("words", "entry"), _entries(), ids=[words for words, _ in _entries()])
def test_options_that_are_checked_before_the_import_are_those_of_the_command(words: str, entry: str) -> None:
    app = typer.Typer()
    app.command()(cli._function(entry))
    options = [each for each in typer.main.get_command(app).params if each.param_type_name == "option"]
    real = {name for each in options for name in each.opts if name.startswith("--")}
    completion = {"--install-completion", "--show-completion"}
    assert real - completion <= set(cli.option_names(entry)), words


def test_a_wrong_option_is_refused_before_torch_is_imported() -> None:
    program = "import sys\nfrom laconic.cli import main\n"
    program += "try: main(['report', '--bogus'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == "False\n"


def test_the_list_of_commands_cuts_no_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "..." not in said.replace("[ARGS]...", "")
    assert "List every codec, or explain one" in said


def test_codecs_explains_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert _json(capsys, "codecs", "topk(0.01)", "--json")["name"] == "topk"
    with pytest.raises(SystemExit):
        main(["codecs", "qsgd"])
    said = capsys.readouterr().out
    assert "options:" in said
    assert "laconic.compress(ddp, " in said


def test_report_takes_the_latest_run_or_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report"])
    assert ended.value.code == 2
    assert "there is no latest run in runs/" in capsys.readouterr().err
