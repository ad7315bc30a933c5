"""The prepared Python that the scripts of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.prepared import PreparedPython


@pytest.fixture(scope="module")
def python() -> Iterator[PreparedPython]:
    with PreparedPython() as prepared:
        yield prepared
