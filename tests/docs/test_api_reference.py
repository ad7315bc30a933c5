"""The API reference renders: examples as code, sections whole, nothing that only developers need."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laconic import errors
from tests.docs.pages import ROOT

MET = [
    "compress", "distribute", "elastic", "search", "Job", "Samples", "consistency.Agreement", "workloads.Workload",
    "parallel.Stages", "parallel.Dense", "consistency.elastic.options.ElasticOptions", "optim.OneBitAdam",
    "exchange.job.BucketRecord", "exchange.job.StepRecord", "searching.spec.SearchSpec", "parallel.state.load_whole",
    "integrations.transformers.LaconicCallback", "integrations.loggers.JsonLines", "integrations.ray.train_loop",
    "consistency.elastic.job.ElasticJob", "codecs.register", "workloads.register",
]  # fmt: skip
CONFIG = """
site_name: API
docs_dir: {folder}/docs
site_dir: {folder}/site
plugins:
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """docs/reference/api.md as HTML, by the options of the site; Material is not needed for it."""
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("api")
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text((ROOT / "docs" / "reference" / "api.md").read_text())
    site = (ROOT / "mkdocs.yml").read_text()
    plugin = site[site.index("  - mkdocstrings:") : site.index("validation:")]
    extensions = site[site.index("markdown_extensions:") : site.index("plugins:")]
    # what the options name is found from the folder of the configuration
    plugin = plugin.replace("[src]", f"[{ROOT}/src]").replace("[docs/site", f"[{ROOT}/docs/site")
    (folder / "mkdocs.yml").write_text(CONFIG.format(folder=folder) + plugin + extensions)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(folder / "mkdocs.yml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return (folder / "site" / "index.html").read_text()


def _said(page: str) -> str:
    """The text outside code blocks."""
    prose = re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", prose))


def test_examples_are_code(page: str) -> None:
    said = _said(page)
    assert page.count("language-pycon") > 60
    assert ">>>" not in said, "an example is in the text"
    assert "```" not in said, "a fence is in the text"
    assert "<blockquote>" not in page, "an example was taken for a quotation"


def test_sections_are_whole(page: str) -> None:
    said = _said(page)
    assert "Callers:" not in said
    assert len(re.findall(r"<strong>Source:</strong> \S", page)) > 10
    assert re.search(r"<strong>Returns:</strong> The job: <code>finish\(\)</code>", page)
    for label in ("Source", "Returns", "Differs", "Cost"):
        assert not re.search(rf"(?<!<strong>)\b{label}: [A-Z]", page), f"{label} is run together with other text"
    assert "doc-section-admonition" not in page
    assert "<summary>Source" not in page


@pytest.mark.parametrize("name", MET)
def test_what_a_user_meets_is_there(name: str, page: str) -> None:
    assert f'id="laconic.{name}"' in page


def test_every_error_is_there(page: str) -> None:
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, errors.LaconicError):
            assert f'id="laconic.errors.{name}"' in page, name


def test_signatures_are_whole(page: str) -> None:
    said = html.unescape(re.sub(r"<[^>]+>", "", page))
    signature = said[said.index("search(\n") :][:1500]
    for part in ("space:", "trials:", "parallel:", "-> Result"):
        assert part in signature


def test_what_only_refuses_or_is_private_is_not_there(page: str) -> None:
    said = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert "Never" not in said
    assert "unknown:" not in said
    assert not re.search(r"\b_\w+\s*:", said), "a private field is in a signature"


def test_errors_are_entries_with_links(page: str) -> None:
    assert not re.search(r"PeerLost, \w+:", _said(page))
    assert page.count('href="#laconic.errors.PeerLost"') > 5
    drawn = "".join(re.findall(r"<pre.*?</pre>", page, re.DOTALL))
    assert "├── BadInput" in html.unescape(re.sub(r"<[^>]+>", "", drawn))


def test_docstrings_become_markdown() -> None:
    spec = importlib.util.spec_from_file_location("docstrings", Path(ROOT / "docs" / "site" / "docstrings.py"))
    assert spec is not None
    assert spec.loader is not None
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = "Halve. Callers: all.\n\nSource: a\npaper. Differs: twice.\n\n"
    told += "Returns:\n    The half: rounded.\n\nRaises:\n    PeerLost, ValueError: one\n        died.\n\n"
    told += "A\n├── B\n\n>>> 4 / 2\n2.0"
    assert module.readable(told) == (
        "Halve.\n\n**Source:** a\npaper.\n\n**Differs:** twice.\n\n**Returns:** The half: rounded.\n\n"
        "**Raises:**\n\n- [`PeerLost`][laconic.errors.PeerLost]: one\n    died.\n- `ValueError`: one\n    died.\n\n"
        "```text\nA\n├── B\n```\n\n```pycon\n>>> 4 / 2\n2.0\n```"
    )
