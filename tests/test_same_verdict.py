"""The verdict of `make test` depends on the code, not on chance."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

TESTS = Path(__file__).parent
UNSEEDED = {"default_rng", "Random", "SystemRandom"}


@pytest.mark.skipif("not config.getoption('--hypothesis-profile', None) in (None, 'same')", reason="another profile")
def test_hypothesis_draws_the_same_examples_in_every_suite() -> None:
    for chosen in (hypothesis.settings(), hypothesis.settings(max_examples=3)):
        assert chosen.derandomize
        assert chosen.database is None
        assert chosen.deadline is None


DRAWS = []


@pytest.mark.parametrize("turn", [0, 1])
def test_unnamed_generators_begin_alike_in_every_test(turn: int) -> None:
    DRAWS.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    assert DRAWS[0] == DRAWS[-1]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda p: str(p.relative_to(TESTS)))
def test_no_generator_without_a_seed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in UNSEEDED, f"{path.name}:{node.lineno}: {name}() draws otherwise in every run"
