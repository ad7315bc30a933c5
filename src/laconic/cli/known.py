"""Workloads and codecs by name without importing torch, which takes seconds: an unknown name is refused at once.

Caller: `laconic.cli.main`. The names, and those of codecs' options, are read from the source; a test compares them with
the registries. One's own workload, module:factory, which may bring codecs, and one with arguments are left to the
command; so are the values of options.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

from laconic.errors import UnknownName
from laconic.specs import split

PACKAGE = Path(__file__).parents[1]
OWN = ("single", "auto")  # neither codecs nor peers
_BUILT = re.compile(r"(?:^|[,:+/])\s*([\w-]+)(\([^()]*\))")  # with arguments; what follows @ is a mode
_PLAIN = re.compile(r"\s*(?:(?:compress|distribute|elastic):)?([\w+-]+)(?:@.*)?\s*")  # without arguments


def check(words: Sequence[str]) -> None:
    """Raise UnknownName where the workload that follows `train` or `compare`, or a codec to train by, is unknown."""
    if "laconic.workloads" in sys.modules:  # the registry is there already, and may know others
        return
    if len(words) > 1 and words[0] in ("train", "compare") and re.fullmatch(r"\w[\w-]*", words[1]):
        names = set(registered("workloads"))
        if words[1] not in names:
            raise UnknownName("workload", words[1], names)
        for option, value in pairwise(words):
            if option in ("--codec", "--configs"):
                _check_codecs(value)


def _check_codecs(configurations: str) -> None:
    """Refuse what `lab/runs/spec.py` refuses, by the same sentence; what is more than names is left to it."""
    codecs, plain = set(registered("codecs")), re.sub(r"\([^()]*\)", "", configurations)
    for part in plain.split(",") if "(" not in plain else ():
        first, *others = found[1].split("+") if (found := _PLAIN.fullmatch(part)) else [""]
        if first and first not in (valid := {*codecs, *peers(), *OWN}):
            raise UnknownName("configuration", first, valid)
        for other in others:
            if other not in codecs:
                raise UnknownName("codec", other, codecs)
    for name, arguments in _BUILT.findall(configurations):
        for key, _ in split("codec", name + arguments)[1] if name in codecs else ():
            if key is not None and key not in (listed := options()[name]):
                raise UnknownName(f"option of codec '{name}'", key, listed)


def registered(package: str) -> Iterator[str]:
    """The names in `@register(…)` and `Workload(name=…)` of a package's files."""
    for path in sorted((PACKAGE / package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                first = [*node.args, *(each.value for each in node.keywords if each.arg == "name")][:1]
                if node.func.id in ("Workload", "register") and first and isinstance(first[0], ast.Constant):
                    yield str(first[0].value)


def options() -> dict[str, list[str]]:
    """The options of each codec: the fields of the classes it is derived from, and its own."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (PACKAGE / "codecs").glob("*.py")]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def fields(node: ast.ClassDef) -> list[str]:
        inherited = [fields(classes[name]) for base in node.bases if (name := ast.unparse(base)) in classes]
        own = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        named = [ast.unparse(each.target) for each in own if "ClassVar" not in ast.unparse(each.annotation)]
        return [*chain.from_iterable(inherited), *named]

    made = [(call, node) for node in classes.values() for call in node.decorator_list if isinstance(call, ast.Call)]
    return {ast.literal_eval(call.args[0]): fields(node) for call, node in made if ast.unparse(call.func) == "register"}


def peers() -> Iterator[str]:
    """The keys of `PEERS`, which are no codecs."""
    source = (PACKAGE / "lab" / "runs" / "strategies.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
            yield from keys if ast.unparse(node.targets[0]) == "PEERS" else ()
