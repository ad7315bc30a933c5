"""One grammar for everything that has a name, and one registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from laconic import codecs, consistency, specs
from laconic.errors import BadInput, UnknownName
from laconic.registry import Registry
from laconic.workloads import models

THINGS: Registry[Callable[..., Any]] = Registry("thing")


@THINGS.register("made-of")
@dataclass(frozen=True)
class Made:
    """A dataclass."""

    name: ClassVar[str]
    size: Any = 1
    words: Any = None
    flag: Any = False

    def __str__(self) -> str:
        return specs.spec_of(self)


@THINGS.register("called")
def called(depth: int, rate: float = 0.5, word: str = "a", *, sizes: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """A function."""
    if depth < 0:
        raise TypeError("a mistake of the function's own")
    return depth, rate, word, sizes


@pytest.mark.parametrize(
    ("spec", "size", "words", "flag"),
    [
        ("made-of", 1, None, False),
        (" made-of ( ) ", 1, None, False),
        ("made-of(2, flag=true)", 2, None, True),
        ("made-of(-1.5e+3, None, TRUE)", -1500.0, None, True),
        ("made-of(size=(64, 256, 10), words=())", (64, 256, 10), (), False),
        ("made-of([1, (2, 3)], words=ring)", [1, (2, 3)], "ring", False),
        ("made-of('a, b)', words=\"=x\")", "a, b)", "=x", False),
        ("made-of(words = 10.0.0.1:80)", 1, "10.0.0.1:80", False),
    ],
)
def test_values_of_every_kind_are_read(spec: str, size: Any, words: Any, flag: Any) -> None:
    built = specs.build(THINGS, spec)
    assert (built.size, built.words, built.flag) == (size, words, flag)
    assert type(built.size) is type(size)


@pytest.mark.parametrize("spec", ["made-of", "made-of(3)", "made-of((1, 2), words=ring, flag=true)", "made-of(true)"])
def test_the_text_of_what_was_built_builds_it_again(spec: str) -> None:
    built = specs.build(THINGS, spec)
    assert str(built) == spec
    assert specs.build(THINGS, str(built)) == built


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("", "not of the form name"),
        ("a b", "not of the form name"),
        ("made-of(", "not of the form name"),
        ("3d", "not of the form name"),
        ("made-of(1,)", "empty argument"),
        ("made-of(,)", "empty argument"),
        ("made-of(1, 2, 3, 4)", "takes at most 3 arguments: size, words, flag"),
        ("made-of(1, size=2)", "option 'size' is given twice"),
        ("made-of((1, 2)", "cannot be read"),
        ("made-of('a)", "cannot be read"),
        ("made-of(**{})", "cannot be read"),
        ("made-of(a b)", "cannot be read"),
        ("made-of(__import__('os'))", "cannot be read"),
        ("made-of([__import__])", "cannot be read"),
        ("made-of(" + "[" * 500 + ")", "cannot be read"),
        ("called", "missing a required argument: 'depth'; its options: depth, rate, word, sizes"),
        ("called(x)", "depth is a whole number, got 'x'"),
        ("called(true)", "depth is a whole number, got True"),
        ("called(1, rate=fast)", "rate is a number, got 'fast'"),
        ("called(1, word=2)", "word is a word, got 2"),
        ("called(1, rate=nan)", "rate is a number, got nan"),
    ],
)
def test_what_cannot_be_read_gets_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        specs.build(THINGS, spec)


def test_unknown_names_and_options_are_suggested() -> None:
    with pytest.raises(UnknownName, match="unknown thing 'made'; did you mean 'made-of'"):
        specs.build(THINGS, "made")
    with pytest.raises(UnknownName, match="unknown option of thing 'called' 'dept'; did you mean 'depth'"):
        specs.build(THINGS, "called(dept=3)")


def test_a_functions_own_mistake_is_not_hidden() -> None:
    with pytest.raises(TypeError, match="of the function's own"):
        specs.build(THINGS, "called(-1)")
    assert specs.build(THINGS, "called(3, sizes=(1, 2))") == (3, 0.5, "a", (1, 2))


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="thing name 'called' is taken"):
        THINGS.register("called")(called)


def test_codecs_modes_and_networks_read_the_same_grammar() -> None:
    """What is an error in one is an error in all, in the same words."""
    builders: list[tuple[str, Callable[[str], Any]]] = [
        ("qsgd", codecs.codec), ("local", consistency.build), ("vgg16", models.build)
    ]  # fmt: skip
    wrong = [("(,)", "empty argument"), ("(spede=1)", "unknown option of"), ("(a b)", "cannot be read")]
    for name, build in builders:
        for arguments, sentence in wrong:
            with pytest.raises(BadInput, match=sentence):
                build(name + arguments)
