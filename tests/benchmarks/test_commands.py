"""`python -m benchmarks`: its list, and one sentence with exit code 2 for bad input."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from benchmarks.__main__ import HERE, benchmarks, main, module_name

AT_LEAST_ONE = (
    "operators --batch 0", "operators --batch 2 --batch -1", "operators --threads 0", "operators --turns -1",
    "planner --blocks 0", "planner --blocks -1", "divide --set pipeline --blocks 0", "divide --steps 0",
    "distributed --steps 0", "code --trees 0", "shrink --seeds 0", "shrink --goals -1", "shrink --threads 0",
    "cost-published vgg16 --batch 0", "search --evaluations 0", "search --repeats 0", "search --slow-repeats 0",
    "search --pairs 0", "search --processes 0", "search --kills 0",
)  # fmt: skip
AT_LEAST_ZERO = (
    "operators --workspace-mib -1", "distributed --seed -1", "shrink --first -1", "code --networks -1",
    "search --seed -1",
)  # fmt: skip
ABOVE_ZERO = (
    "operators --tolerance nan", "operators --budget 0.0", "operators --budget inf", "shrink --scale 2.0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cod"], "unknown benchmark 'cod'; did you mean 'code'?"),
        (["code", "--task", "nothing"], "unknown task 'nothing'"),
        *[(line.split(), f"{line.split()[-2]} must be at least 1, got {line.split()[-1]}") for line in AT_LEAST_ONE],
        *[(line.split(), f"{line.split()[-2]} must be at least 0, got {line.split()[-1]}") for line in AT_LEAST_ZERO],
        *[(line.split(), f"{line.split()[-2]} must be above 0 and ") for line in ABOVE_ZERO],
        (["divide", "--set", "pipeline", "--hosts", "2"], "--set pipeline takes no --hosts: it has its own"),
        (["divide", "--set", "pipeline", "--no-pin"], "--set pipeline takes no --pin"),
        (["divide", "--set", "memory", "--steps", "3"], "--set memory takes no --steps"),
        (["divide", "--set", "trick", "--inner", "9"], "--set trick takes no --inner"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_every_benchmark_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [name for name, *_ in lines] == list(benchmarks())
    assert all(len(line) == 2 for line in lines), "a benchmark without a first line"
    assert not list(HERE.glob("[!_]*.py")), "benchmarks are in folders, by topic"


@pytest.mark.parametrize("path", benchmarks().values(), ids=lambda path: path.stem)
def test_every_benchmark_can_be_called(path: Path) -> None:
    """Its module imports without side effects on the command line, and `main` can be called as the list says."""
    main = importlib.import_module(module_name(path)).main
    assert inspect.getdoc(main) or set(inspect.signature(main).parameters) <= {"arguments"}
