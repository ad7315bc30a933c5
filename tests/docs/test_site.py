"""The site can be built without a network, its links and anchors lead somewhere, and it explains every public name."""

from __future__ import annotations

import inspect
import os
import subprocess

import pytest

import laconic
from tests.docs.pages import ROOT


@pytest.mark.parametrize("name", laconic.__all__)
def test_every_public_name_has_an_entry_and_an_example(name: str) -> None:
    listed = (ROOT / "docs" / "reference" / "api.md").read_text().splitlines()
    assert f"::: laconic.{name}" in listed, f"docs/reference/api.md has no entry for laconic.{name}"
    public = getattr(laconic, name)
    said = inspect.getdoc(public) or ""
    assert said, f"laconic.{name} has no docstring"
    assert ">>>" in said or inspect.ismodule(public), f"laconic.{name} has no example"


def test_the_site_builds() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    offline = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=110, env=offline)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = ROOT / ".cache" / "site"
    assert "laconic.compress" in (pages / "docs" / "reference" / "api.html").read_text()
    # opened from a file, a page searches by what these hold
    assert (pages / "search" / "search_index.js").read_text().startswith("var __index = ")
    assert (pages / "docs" / "site" / "iframe-worker.js").exists()
    for page in pages.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text, f"{page.name} loads something from the network"
        assert "iframe-worker.js" in text, f"{page.name} cannot search when it is opened from a file"
        assert 'rel="stylesheet" href="http' not in text, f"{page.name} loads something from the network"
