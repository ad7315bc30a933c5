"""Pages from templates: one HTML file each, that opens offline and runs no script.

Callers: the reports of runs and searches, and the page of a plan. What stands in a record is escaped; only drawings and
what a template wrote itself are markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from laconic import words
from laconic_lab.report.style import page_style

_FILTERS = (words.coverage, words.digits, words.nbytes, words.p_value, words.percent, words.seconds, words.sentence,
            words.times)  # fmt: skip


@cache
def _environment() -> Environment:
    made = Environment(loader=PackageLoader("laconic_lab.report"), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    made.filters.update({each.__name__: each for each in _FILTERS})
    made.tests["blank"] = lambda text: not str(text).strip()
    made.globals.update(words=words, nothing=words.NOTHING, page_style=lambda: Markup(page_style()))
    return made


def render(template: str, **values: Any) -> str:
    """A page from a template of `templates/`."""
    return _environment().get_template(template).render(values)


def document(title: str, eyebrow: str, header: str, sections: Sequence[tuple[str, str, str]], footer: str) -> str:
    """A page of sections (name, title, HTML) that are written already; those without content are left out."""
    frame: Any = _environment().get_template("document.html").module
    marked = [(name, heading, Markup(body)) for name, heading, body in sections]
    return str(frame.document(title, eyebrow, Markup(header), marked, Markup(footer)))
