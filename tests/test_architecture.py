"""The promises of ARCHITECTURE.md that a machine can check: imports point down, public names are listed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import laconic

SOURCE = Path(laconic.__file__).parent
# A package may import itself, those on lower floors, and nothing else of laconic.
FLOORS = {
    "errors": 0,
    "registry": 0.3,
    "specs": 0.5,
    "schedules": 1,
    "codecs": 1,
    "operators": 1,
    "workloads": 1,
    "storage": 1,
    "statistics": 1,
    "transports": 2,
    "shrink": 2,
    "exchange": 3,
    "parallel": 4,
    "consistency": 4,
    "warm": 4.5,
    "planner": 5,
    "lab": 6,
    "search": 7,
    "comprehension": 7,
    "cli": 8,
    "__init__": 8,
    "__main__": 9,
}


def _modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _part(name: str) -> str:
    """The floor's name of a dotted module: laconic.codecs.topk → codecs."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def _imports(path: Path) -> set[str]:
    """The laconic parts a file imports, at any depth; imports for type checkers only count too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {_part(alias.name) for alias in node.names if alias.name.split(".")[0] == "laconic"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "laconic":
                found |= {alias.name if alias.name in FLOORS else "__init__" for alias in node.names}
            elif node.module and node.module.startswith("laconic."):
                found.add(_part(node.module))
    return found


def test_every_part_has_a_floor() -> None:
    parts = {p.relative_to(SOURCE).parts[0].removesuffix(".py") for p in _modules()}
    assert parts <= FLOORS.keys()
    assert len(parts) > 5


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own == "__init__":
        return  # the package's own list of public names
    for other in _imports(path):
        if other == "__init__":
            assert own in ("cli", "__main__"), f"{own} imports names of the top package"
        else:
            assert other == own or FLOORS[other] < FLOORS[own], f"{own} imports {other}, which is not below it"


@pytest.mark.parametrize("path", sorted((SOURCE.parents[1] / "tests" / "reference").glob("*.py")), ids=lambda p: p.name)
def test_references_stand_alone(path: Path) -> None:
    assert _imports(path) == set()


@pytest.mark.parametrize("name", ["laconic", "laconic.schedules", "laconic.codecs"])
def test_public_names_are_listed_and_there(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
    with pytest.raises(AttributeError):
        _ = module.no_such_thing


def test_importing_is_cheap() -> None:
    """`import laconic` brings in neither torch nor numba, and the simulator does not need torch."""
    code = "import sys, laconic; print({'torch', 'numba', 'numpy'} & set(sys.modules))"
    code += "; import laconic.transports.loggp; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "False"]
