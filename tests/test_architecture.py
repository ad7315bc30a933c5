"""The promises of ARCHITECTURE.md that a machine can check: imports point down, public names are listed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import laconic

SOURCE = Path(laconic.__file__).parent
# A package may import itself, those on lower floors, and nothing else of laconic.
FLOORS = {
    "errors": 0,
    "kernels": 0.1,
    "registry": 0.3,
    "quantities": 0.5,
    "text_table": 0.5,
    "specs": 0.5,
    "storage": 0.7,
    "schedules": 1,
    "codecs": 1,
    "operators": 1,
    "workloads": 1,
    "statistics": 1,
    "transports": 2,
    "shrinking": 2,
    "exchange": 3,
    "parallel": 4,
    "consistency": 4,
    "optim": 4,
    "warm": 4.5,
    "words": 1.5,
    "planner": 5,
    "searching": 5,
    "ahead": 7.5,
    "cli": 8,
    "integrations": 8,
    "__init__": 8,
    "__main__": 9,
}


def _modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _all_modules() -> list[Path]:
    """The library's modules and those of the applications beside it."""
    found = sorted(path for folder in SOURCE.parent.glob("laconic*") for path in folder.rglob("*.py"))
    assert len(found) > len(_modules()) + 50
    return found


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


# What may not be imported: each package knows only those before it.
PACKAGES_UP = ("laconic", "laconic_lab", "laconic_code", "benchmarks")


@pytest.mark.parametrize("path", _all_modules(), ids=lambda p: str(p.relative_to(SOURCE.parent)))
def test_the_library_knows_neither_its_applications_nor_benchmarks(path: Path) -> None:
    """`laconic_lab` may import `laconic`, `laconic_code` both, `benchmarks` all; never the other way round."""
    own = path.relative_to(SOURCE.parent).parts[0]
    above = set(PACKAGES_UP[PACKAGES_UP.index(own) + 1 :])
    assert not above & _roots(path)


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    tests = SOURCE.parents[1] / "tests"
    others = [path for path in tests.rglob("*.py") if path.relative_to(tests).parts[0] != "benchmarks"]
    assert len(others) > 100
    assert not [str(path.relative_to(tests)) for path in others if "benchmarks" in _roots(path)]


def _roots(path: Path) -> set[str]:
    """The packages that a file imports, by their first word."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", sorted((SOURCE.parents[1] / "tests" / "reference").glob("*.py")), ids=lambda p: p.name)
def test_references_stand_alone(path: Path) -> None:
    assert _imports(path) == set()


OWN = ("cli", "storage")  # packages that nobody outside is promised anything of
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name not in OWN)


@pytest.mark.parametrize("name", ["laconic", *(f"laconic.{package}" for package in PACKAGES)])
def test_public_names_are_listed_and_there(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
    with pytest.raises(AttributeError):
        _ = module.no_such_thing


def test_what_the_pages_import_is_public() -> None:
    """Pages and examples import from laconic itself, or from a module that it lists."""
    root = SOURCE.parents[1]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").glob("*.py")]
    text = "\n".join(page.read_text() for page in pages)
    found = set(re.findall(r"^\s*(?:from|import) laconic\.(\w+)", text, re.M))
    assert found
    assert found <= {*laconic.__all__, *PACKAGES}


def test_the_top_has_few_names_and_each_is_one_thing() -> None:
    """At most 25, beside the packages that hold the rest; none is a function and a module."""
    assert len(laconic.__all__) <= 25
    assert set(dir(laconic)) - {"__version__"} == {*laconic.__all__, *PACKAGES}
    modules = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    for shared in modules & set(laconic.__all__):
        assert inspect.ismodule(getattr(laconic, shared)), f"laconic.{shared} is a module, and something else"


def test_importing_is_cheap() -> None:
    """`import laconic` brings in neither torch nor numba, and the simulator does not need torch."""
    code = "import sys, laconic; print({'torch', 'numba', 'numpy'} & set(sys.modules))"
    code += "; import laconic.transports.loggp; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "False"]


Function = ast.FunctionDef | ast.AsyncFunctionDef


MOST_HOMONYMS = 6


def test_a_class_name_stands_for_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for path in _all_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(str(path.relative_to(SOURCE.parent)))
    assert len(where) > 100
    homonyms = {name: files for name, files in where.items() if len(files) > 1}
    assert len(homonyms) <= MOST_HOMONYMS, homonyms


MOST_BASES = 3  # of the package, one above the other: what has to be read to know what a class does
# Families of codecs and of modes whose layers are yet to become parts; nothing may be added.
DEEPER = {
    *("AdaComp", "Adaptive", "Threshold", "Fp8", "OneBit", "Sign", "Dynamic8", "Offset", "Mantissa8", "Static8"),
    *("AsyncAgreement", "RudraAgreement", "StaleAgreement", "NaturalAgreement", "SharedWeights", "WindowPairs"),
}


def test_inheritance_is_at_most_three_deep() -> None:
    """Protocols, interfaces and errors count like all classes; a class that is deeper wraps what it needs instead."""
    bases: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module, path in _module_names().items():
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        known = {alias.asname or alias.name: (node.module or "", alias.name) for node in nodes
                 if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        known |= {node.name: (module, node.name) for node in classes}
        for node in classes:
            named = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            bases[module, node.name] = [known[b.id] for b in named if isinstance(b, ast.Name) and b.id in known]

    def depth(name: tuple[str, str]) -> int:
        return max((1 + depth(base) for base in bases[name] if base in bases), default=0)

    assert len(bases) > 300
    assert {name for (_, name) in bases if depth((_, name)) > MOST_BASES} == DEEPER


@pytest.mark.parametrize(("door", "most"), [("compress", 60), ("distribute", 70), ("search", 110)])
def test_a_door_loads_few_modules(door: str, most: int) -> None:
    code = f"import sys, laconic; laconic.{door}; print(sum(name.startswith('laconic') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= most


def _assert_none(found: dict[str, str]) -> None:
    assert not found, found


def _functions(tree: ast.AST) -> list[tuple[ast.ClassDef | None, Function]]:
    """Every function of a file, with the class whose method it is."""
    methods = {id(f): c for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    return [(methods.get(id(f)), f) for f in ast.walk(tree) if isinstance(f, Function)]


def _module_names() -> dict[str, Path]:
    names = {".".join(p.relative_to(SOURCE.parent).with_suffix("").parts): p for p in _all_modules()}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def _imported(node: ast.AST, modules: dict[str, Path]) -> set[str]:
    """The modules of laconic that an import statement names; a package for a name of the package's own."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules.keys()
    if isinstance(node, ast.ImportFrom) and node.module in modules:
        inner = {f"{node.module}.{alias.name}" for alias in node.names}
        return (inner & modules.keys()) or {node.module}
    return set()


def test_no_import_inside_a_function_hides_a_cycle() -> None:
    """What a function imports late does not itself, by any road, need the function's module.

    An import that is late for another reason is fine: a command starts quickly, an engine's package is optional.
    Imports for type checkers count.
    """
    modules = _module_names()
    needs: dict[str, set[str]] = {}
    late: set[tuple[str, str]] = set()
    for name, path in modules.items():
        tree = ast.parse(path.read_text())
        inside = {id(node) for _, function in _functions(tree) for node in ast.walk(function)}
        needs[name] = set()
        for node in ast.walk(tree):
            needs[name] |= _imported(node, modules) - {"laconic"}
            if id(node) in inside:
                late |= {(name, other) for other in _imported(node, modules)}
    assert late, "commands import what they need when they are called"
    found = {}
    for name, other in sorted(late):
        reached, ahead = set(), {other}
        while ahead:
            reached |= ahead
            ahead = set().union(*(needs[module] for module in ahead)) - reached
        if name in reached:
            found[f"import {name.rpartition('.')[2]} → {other.rpartition('.')[2]}"] = f"{name} → {other}"
    _assert_none(found)


def test_every_file_that_the_map_names_exists() -> None:
    """A file or folder of ARCHITECTURE.md, `worker.py` or `consistency/worker_mesh.py`, is one of the repository's."""
    root = SOURCE.parents[1]
    text = (root / "ARCHITECTURE.md").read_text()
    parts = [root / part for part in ("src", "tests", "docs", "benchmarks")]
    there = [f"/{p.relative_to(root)}" for part in parts for p in part.rglob("*")]
    there += [f"/{p.name}" for p in root.iterdir()]
    named = set(re.findall(r"[\w/]+\.(?:py|md|css)\b", text))
    named |= {name.rstrip("/") for name in re.findall(r"[\w/]*\w/(?=[\s`])", text)}
    assert len(named) > 15
    missing = sorted(name for name in named if not any(path.endswith(f"/{name}") for path in there))
    assert not missing, f"ARCHITECTURE.md names what is not there: {missing}"
