"""The report in a real browser: no errors, no network, readable on a phone and a desk, light and dark."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from laconic_lab.report import write_report
from laconic_lab.report.style import DARK, LIGHT
from tests.laconic_lab.sample_records import compare_record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def _browse(page: Path, *flags: str) -> tuple[str, str]:
    """The page's DOM after loading, and what the browser's console said."""
    assert BROWSER is not None
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
    command = [BROWSER, "--headless", "--disable-gpu", "--no-first-run", "--enable-logging=stderr", *offline, *root,
               *flags, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_a_browser_shows_the_report_offline(tmp_path: Path):
    write_report(compare_record(), tmp_path)
    dom, console = _browse(tmp_path / "report.html")
    assert console == ""
    table = dom.split('id="headline"')[1].split("</table>")[0]
    assert table.count("<tr>") == 5
    assert dom.count('class="chart wide"') == dom.count('class="chart narrow"') == 4


MEASURE = """<!doctype html><body>%s<pre id=out></pre><script>
console.error("the console is heard");
function measure(frame) {
  const page = frame.contentDocument, box = e => e.getBoundingClientRect();
  const all = what => [...page.querySelectorAll(what)];
  return {
    wide: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    charts: all("figure > svg").filter(e => box(e).width > 100).map(e => e.getAttribute("class")),
    banner: box(page.querySelector("#failing")).bottom,
    smallest: Math.min(...all("figure > svg text").map(e => box(e).height).filter(height => height > 0)),
  };
}
addEventListener("load", () => {
  out.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
});
</script>"""


@pytest.mark.parametrize(("scheme", "background"), [(1, LIGHT["page"]), (0, DARK["page"])], ids=["light", "dark"])
def test_it_fits_a_phone_and_a_desk_in_both_schemes(scheme: int, background: str, tmp_path: Path):
    """Nothing sticks out, charts are there at a readable size, and what fails is on the first screen."""
    record = compare_record()
    record.finished = False
    write_report(record, tmp_path)
    sizes = ((390, 844), (1280, 800))
    frames = "".join(f'<iframe src="report.html" style="width:{w}px;height:{h}px"></iframe>' for w, h in sizes)
    (tmp_path / "measure.html").write_text(MEASURE % frames)
    dom, console = _browse(tmp_path / "measure.html", "--allow-file-access-from-files",
                           f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1400,1000")  # fmt: skip
    assert "the console is heard" in console
    phone, desk = json.loads(re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)[1])  # type: ignore[index]
    assert (phone["wide"], desk["wide"]) == (0, 0)
    assert phone["charts"] == ["chart narrow"] * 4
    assert desk["charts"] == ["chart wide"] * 4
    assert phone["banner"] < 844
    assert desk["banner"] < 800
    assert min(phone["smallest"], desk["smallest"]) >= 10
    colour = ", ".join(str(int(background[i : i + 2], 16)) for i in (1, 3, 5))
    assert phone["background"] == desk["background"] == f"rgb({colour})"
