"""What an embedding knows of the language: analogies, and the test of distances.

Caller: `laconic code analogies`. A question is four statements, a to b as x to y, all in the vocabulary. It is
answered when y is among the five statements nearest to x + b − a (cosine; vectors of length 1). Questions are made by
rules, from grammar; none is written by hand, so that any vocabulary has questions.

    types        the same operation on another type, for two operations
    options      fast-math flags; the index of an element
    conversions  an operation and the one that takes it back: casts, and sums and products
    structures   structures and vectors of the same content

Source: Neural Code Comprehension, NeurIPS 2018, §6.1, table 2. Differs: the paper lists 51 pairs of bitcasts, 14 of
trunc and ext, and 17 of ptrtoint by hand, some of which are not inverses; here every pair of the vocabulary takes part.
The paper's own list, or any other, can be asked from a file: four lines a question, `# name` before those of a part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic_code.embedding import Embedding, normalised

Question = tuple[str, str, str, str]
TOP = 5
_ANSWERED_AT_ONCE = 512
# Correct answers, and questions, of the published embedding; distances in per cent.
PUBLISHED = {"types": (226, 560), "options": (45, 53), "conversions": (135, 1524), "structures": (7, 8)}
PUBLISHED_PARTS = {
    "integer operations by type": (96, 307), "float operations by type": (119, 229), "float for integer": (11, 16),
    "elements by type": (0, 8), "fast-math flags": (36, 43), "elements by index": (5, 6), "fields by index": (4, 4),
    "bitcast and back": (110, 1275), "sum and difference, integers": (0, 4), "sum and difference, floats": (1, 12),
    "trunc and ext": (11, 91), "float to integer and back": (2, 6), "pointer to integer and back": (11, 136),
    "structure for vector": (7, 8),
}  # fmt: skip
PUBLISHED_DISTANCES = {
    "add": 76.64, "fadd": 82.82, "sub": 70.27, "fsub": 86.09, "mul": 79.32, "fmul": 87.50, "ret": 71.19, "fdiv": 89.72,
    "udiv": 74.82, "sdiv": 84.08, "bitwise": 77.60,
}  # fmt: skip
_CATEGORIES = {name: f"<%ID> = {name} " for name in PUBLISHED_DISTANCES} | {
    "ret": "ret ", "bitwise": "<%ID> = (shl|lshr|ashr|and|or|xor) ",
}  # fmt: skip

_INTEGERS = ["i1", "i2", "i4", "i8", "i32", "i64", "i128", *(f"<{n} x i8>" for n in (4, 8, 16, 32)),
             *(f"<{n} x i16>" for n in (4, 8, 16)), *(f"<{n} x i32>" for n in (4, 8, 16, 32)),
             *(f"<{n} x i64>" for n in (2, 4, 8))]  # fmt: skip
_FLOATS = [*("float", "<2 x float>", "<4 x float>", "<8 x float>"),
           *("double", "<2 x double>", "<4 x double>", "<8 x double>")]  # fmt: skip
_FLAGS = ("", "nnan ", "ninf ", "nsz ", "arcp ", "contract ", "afn ", "reassoc ", "fast ")
_ELEMENTS = [*((n, "float") for n in (2, 4, 8)), *((n, "double") for n in (2, 4, 8)), (4, "i1"), (8, "i8"), (32, "i8"),
             *((n, f"i{bits}") for bits in (16, 32, 64) for n in (2, 4, 8, 16))]  # fmt: skip
_INTEGER_OPERATIONS = {
    **dict.fromkeys(("add", "sub", "mul"), ("", "nuw ", "nsw ", "nuw nsw ")),
    **dict.fromkeys(("udiv", "sdiv"), ("", "exact ")), **dict.fromkeys(("urem", "srem"), ("",)),
}  # fmt: skip


def _binary(operation: str, options: str, type_: str, operands: tuple[str, str]) -> str:
    return f"<%ID> = {operation} {options}{type_} {operands[0]}, {operands[1]}"


def _operands(literal: str) -> list[tuple[str, str]]:
    return list(product(("<%ID>", literal), ("<%ID>", literal)))


def _integers_by_type(_: Mapping[str, int]) -> Iterator[Question]:
    for operands, (p, q) in product(_operands("<INT>"), combinations(_INTEGER_OPERATIONS, 2)):
        for (s, t), m, n in product(combinations(_INTEGERS, 2), _INTEGER_OPERATIONS[p], _INTEGER_OPERATIONS[q]):
            yield (_binary(p, m, s, operands), _binary(p, m, t, operands),
                   _binary(q, n, s, operands), _binary(q, n, t, operands))  # fmt: skip


def _floats_by_type(_: Mapping[str, int]) -> Iterator[Question]:
    pairs = combinations(("fadd", "fsub", "fmul", "fdiv"), 2)
    for (p, q), (s, t), flag, operands in product(pairs, combinations(_FLOATS, 2), _FLAGS, _operands("<FLOAT>")):
        yield (_binary(p, flag, s, operands), _binary(p, flag, t, operands),
               _binary(q, flag, s, operands), _binary(q, flag, t, operands))  # fmt: skip


def _float_for_integer(_: Mapping[str, int]) -> Iterator[Question]:
    types = {"i32": "float", "<4 x i32>": "<4 x float>", "<8 x i32>": "<8 x float>", "i64": "double",
             **{f"<{n} x i64>": f"<{n} x double>" for n in (2, 4, 8)}}  # fmt: skip
    for (p, q), operands, t in product(combinations(("add", "sub", "mul"), 2), _operands("<INT>"), types):
        floats = (operands[0].replace("INT", "FLOAT"), operands[1].replace("INT", "FLOAT"))
        yield (_binary(p, "", t, operands), _binary(f"f{p}", "", types[t], floats),
               _binary(q, "", t, operands), _binary(f"f{q}", "", types[t], floats))  # fmt: skip


def _element(kind: tuple[int, str], index: int, into: str, value: str) -> tuple[str, str]:
    vector = f"<{kind[0]} x {kind[1]}>"
    return (f"<%ID> = insertelement {vector} {into}, {kind[1]} {value}, <TYP> {index}",
            f"<%ID> = extractelement {vector} <%ID>, <TYP> {index}")  # fmt: skip


def _elements_by_type(_: Mapping[str, int]) -> Iterator[Question]:
    ways = list(product(range(8), ("<%ID>",), ("<%ID>", "<FLOAT>")))
    for (s, t), way in product(combinations(_ELEMENTS, 2), ways):
        yield (_element(s, *way)[0], _element(t, *way)[0], _element(s, *way)[1], _element(t, *way)[1])


def _elements_by_index(_: Mapping[str, int]) -> Iterator[Question]:
    ways = list(product(("<%ID>",), ("<%ID>", "<FLOAT>")))
    for t, (i, j), way in product(_ELEMENTS, combinations(range(8), 2), ways):
        yield (_element(t, i, *way)[0], _element(t, j, *way)[0], _element(t, i, *way)[1], _element(t, j, *way)[1])


def _fields_by_index(vocabulary: Mapping[str, int]) -> Iterator[Question]:
    """The first field is put into undef; so it stands for its extraction as the second does for its own."""
    for name in vocabulary:
        if found := re.fullmatch(r"<%ID> = insertvalue (\{ .* \}) undef, (.*) <%ID>, 0", name):
            whole = found[1]
            take = [f"<%ID> = extractvalue {whole} <%ID>, {n}" for n in (0, 1)]
            second = (each for each in vocabulary if each.startswith(f"<%ID> = insertvalue {whole} <%ID>, "))
            yield from ((name, take[0], put, take[1]) for put in second if put.endswith(", 1"))


def _fast_math(_: Mapping[str, int]) -> Iterator[Question]:
    pairs = combinations(("fadd", "fsub", "fmul", "fdiv"), 2)
    for (p, q), t, operands in product(pairs, _FLOATS, _operands("<FLOAT>")):
        yield (_binary(p, "", t, operands), _binary(p, "fast ", t, operands),
               _binary(q, "", t, operands), _binary(q, "fast ", t, operands))  # fmt: skip


def _inverses(there: str, back: str) -> Callable[[Mapping[str, int]], Iterator[Question]]:
    """Questions from every two pairs of a conversion and one that takes it back."""

    def questions(vocabulary: Mapping[str, int]) -> Iterator[Question]:
        pattern = re.compile(rf"<%ID> = ({there}) (.*) <%ID> to (.*)")
        pairs = []
        for found in filter(None, map(pattern.fullmatch, vocabulary)):
            for name in back.split("|"):
                inverse = f"<%ID> = {name} {found[3]} <%ID> to {found[2]}"
                signs_fit = there != "fptosi|fptoui" or found[1][4:6] == name[:2]
                if inverse in vocabulary and inverse != found[0] and signs_fit:
                    pairs.append((found[0], inverse))
        yield from ((*p, *q) for p, q in combinations(pairs, 2))

    return questions


def _sums_and_products(vocabulary: Mapping[str, int]) -> Iterator[Question]:
    for t, options in product(_INTEGERS, _INTEGER_OPERATIONS["add"]):
        a, b, x = (_binary(name, options, t, ("<%ID>", "<%ID>")) for name in ("add", "sub", "mul"))
        yield a, b, x, _binary("udiv", options, t, ("<%ID>", "<%ID>"))


def _float_sums_and_products(_: Mapping[str, int]) -> Iterator[Question]:
    for t, flag, operands in product(_FLOATS, _FLAGS, _operands("<FLOAT>")):
        a, b, x, y = (_binary(name, flag, t, operands) for name in ("fadd", "fsub", "fmul", "fdiv"))
        yield a, b, x, y


def _structures(vocabulary: Mapping[str, int]) -> Iterator[Question]:
    """What is taken from a structure of equal members, and from the vector of them."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(vocabulary):
        if found := re.fullmatch(r"<%ID> = extractvalue \{ ([^ ,]+)((?:, \1)+) \} <%ID>, (\d+)", name):
            vector = f"<{found[2].count(',') + 1} x {found[1]}>"
            pairs.setdefault(vector, []).append((name, f"<%ID> = extractelement {vector} <%ID>, <TYP> {found[3]}"))
    for same in pairs.values():
        yield from ((*p, *q) for p, q in combinations(same, 2))


PARTS: dict[str, dict[str, Callable[[Mapping[str, int]], Iterable[Question]]]] = {
    "types": {
        "integer operations by type": _integers_by_type, "float operations by type": _floats_by_type,
        "float for integer": _float_for_integer, "elements by type": _elements_by_type,
    },
    "options": {
        "fast-math flags": _fast_math, "elements by index": _elements_by_index, "fields by index": _fields_by_index,
    },
    "conversions": {
        "bitcast and back": _inverses("bitcast", "bitcast"), "sum and difference, integers": _sums_and_products,
        "sum and difference, floats": _float_sums_and_products, "trunc and ext": _inverses("trunc", "sext|zext"),
        "float to integer and back": _inverses("fptosi|fptoui", "sitofp|uitofp"),
        "pointer to integer and back": _inverses("inttoptr", "ptrtoint"),
    },
    "structures": {"structure for vector": _structures},
}  # fmt: skip


def analogies(embedding: Embedding) -> list[dict[str, Any]]:
    """For each part: the questions that the vocabulary allows, how many are answered, and what was published."""
    unit = normalised(embedding.vectors)
    rows = []
    for kind, parts in PARTS.items():
        for part, make in parts.items():
            made = make(embedding.vocabulary)
            asked = list(dict.fromkeys(q for q in made if all(s in embedding.vocabulary for s in q)))
            rows.append({"kind": kind, "part": part, "correct": _answered(unit, embedding, asked),
                         "questions": len(asked), "published": list(PUBLISHED_PARTS[part])})  # fmt: skip
    return rows


def asked_from(path: str | Path, embedding: Embedding) -> list[dict[str, Any]]:
    """As `analogies`, with the questions of a file; those with a statement that is not in the vocabulary are counted.

    Raises:
        BadInput: it cannot be read, or a question has no four statements.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no text of questions: {error}") from error
    parts: dict[str, list[str]] = {}
    statements = parts.setdefault("questions", [])
    for line in lines:
        if line.startswith("#"):
            statements = parts.setdefault(re.sub(r": \d+$", "", line[1:].strip()), [])
        elif line.strip():
            statements.append(line.strip())
    unit, rows = normalised(embedding.vectors), []
    for part, found in parts.items():
        if len(found) % 4:
            raise BadInput(f"{path}: {part} has {len(found)} statements, and a question has four")
        made: list[Question] = list(zip(*(found[k::4] for k in range(4)), strict=True))
        known = [each for each in made if all(s in embedding.vocabulary for s in each)]
        if made:
            rows.append({"kind": "file", "part": part, "correct": _answered(unit, embedding, known),
                         "questions": len(known), "unknown": len(made) - len(known)})  # fmt: skip
    return rows


def _answered(unit: np.ndarray[Any, np.dtype[np.float32]], embedding: Embedding, asked: list[Question]) -> int:
    numbers = np.array([[embedding.vocabulary[s] for s in q] for q in asked], dtype=np.int64).reshape(-1, 4)
    correct = 0
    for start in range(0, len(numbers), _ANSWERED_AT_ONCE):
        a, b, x, y = numbers[start : start + _ANSWERED_AT_ONCE].T
        likeness = (unit[x] + unit[b] - unit[a]) @ unit.T
        better = (likeness > likeness[np.arange(len(y)), y][:, None]).sum(axis=1)
        correct += int((better < TOP).sum())
    return correct


def distances(embedding: Embedding) -> list[dict[str, Any]]:
    """How often two statements of a category are nearer to each other than one of them is to a third from outside.

    Nearness is the product of the vectors as they are. Categories with fewer than two statements are left out.

    Raises:
        BadInput: no category has two statements.
    """
    names = sorted(embedding.vocabulary, key=embedding.vocabulary.__getitem__)
    rows = []
    for category, pattern in _CATEGORIES.items():
        inside = np.array([re.match(pattern, name) is not None for name in names])
        if inside.sum() < 2:
            continue
        products = embedding.vectors[inside] @ embedding.vectors.T
        outside = np.sort(products[:, ~inside], axis=1)
        own = products[:, inside]
        true = sum(
            int(np.searchsorted(outside[n], np.delete(own[n], n), side="left").sum()) for n in range(len(own))
        )
        total = len(own) * (len(own) - 1) * outside.shape[1]
        rows.append({"category": category, "statements": int(inside.sum()), "percent": 100 * true / max(total, 1),
                     "published": PUBLISHED_DISTANCES[category]})  # fmt: skip
    if not rows:
        raise BadInput("the vocabulary has no two statements of a kind; train the embedding on more programs")
    return rows
