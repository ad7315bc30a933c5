"""Links lead somewhere, and figures come from files that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in LINK.findall(prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_figures_in_the_docs_come_from_a_file() -> None:
    """Benchmark tables name the JSON they were made from, and it is there."""
    named = re.findall(r"benchmarks/results/[\w.-]+\.json", "\n".join(page.read_text() for page in PAGES))
    for name in set(named):
        assert (ROOT / name).exists(), name
    for record in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert record.stat().st_size > 0, record.name
        assert json.loads(record.read_text()), record.name


def test_the_page_of_workloads_shows_the_example_as_it_is() -> None:
    example = (ROOT / "examples" / "my_workload.py").read_text().split('"""', 2)[2].strip()
    assert example in (ROOT / "docs" / "reference" / "workloads.md").read_text()


@pytest.mark.parametrize("part", ["start", "guides"])
def test_guides_hold_no_results_of_aims(part: str) -> None:
    """Aims that were missed, commits and the load of a machine are in docs/research."""
    for page in (ROOT / "docs" / part).glob("*.md"):
        text = page.read_text()
        found = re.search(r"\*\*missed\*\*|, missed \||\bcommit [0-9a-f]{7,}|busy machine|machine busy", text)
        assert found is None, f"{page.name}: {found}"


def test_pages_that_the_code_names_exist() -> None:
    """A docstring, comment or message that names a page names one that is there."""
    files = [path for part in ("src", "benchmarks", "examples", "tests") for path in (ROOT / part).rglob("*.py")]
    page = re.compile(r"\bdocs/[\w/-]+\.(?:md|svg)")
    named = {(name, file.name) for file in files for name in page.findall(file.read_text())}
    assert len(named) > 15
    assert not sorted(pair for pair in named if not (ROOT / pair[0]).exists())
