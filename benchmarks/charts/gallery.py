"""Runs the commands that draw something, takes a picture of each page, and writes docs/research/gallery.md.

make gallery          needs Chromium; as root the comparison runs over emulated links, else over loopback
"""

from __future__ import annotations

import argparse
import html
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "research" / "gallery"
CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--disable-quic"]  # fmt: skip
PROGRAM = """define i32 @sum(ptr %x, i32 %n) {
entry:
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %next, %loop ]
  %s = phi i32 [ 0, %entry ], [ %t, %loop ]
  %p = getelementptr i32, ptr %x, i32 %i
  %v = load i32, ptr %p
  %t = add nsw i32 %s, %v
  %next = add nsw i32 %i, 1
  %more = icmp slt i32 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret i32 %t
}
"""


@dataclass(frozen=True)
class Picture:
    """One picture of the gallery.

    Attributes:
        name: of the file in docs/gallery.
        title: what is seen.
        commands: what draws it, in one folder for the whole gallery.
        page: the page or picture to take, within that folder; None takes what the last command printed.
        height: how much of the page, in pixels of a screen 1200 wide.
        figure: the one figure of a report to take, by its id; all of the page without it.
    """

    name: str
    title: str
    commands: tuple[str, ...]
    page: str | None
    height: int = 900
    figure: str = ""


GALLERY = (
    Picture("compare", "A comparison: accuracy beside every speed-up, and the verdict of the lint",
            ("laconic compare digits-mlp -n 2 --configs ddp,compress:dynamic8,distribute:dynamic8 --seeds 3 --epochs 3 "
             "--runs compare{link}",),
            "compare/latest/report.html", 1100),
    Picture("timeline", "The last two steps on the clock: computing, encoding, wire and decoding by layer",
            ("laconic train digits-mlp -n 2 --codec distribute:dynamic8 --epochs 2 --runs timeline",),
            "timeline/latest/report.html", 300, "timeline-0"),
    Picture("pipeline", "A pipeline of two stages: who computes and who waits",
            ("laconic train digits-mlp -n 2 --divide 'stages(micro=4)' --epochs 2 --runs pipeline",),
            "pipeline/latest/report.html", 420, "timeline-0"),
    Picture("plan", "A plan: every way to train as time against bytes, and the one to take",
            ("laconic plan vgg16 -n 16 --link 1gbit,50us --device-profile v100 --html plan.html",), "plan.html", 1100),
    Picture("search", "A search: the best so far, parallel coordinates, importance, and every trial that failed",
            ("laconic search digits-mlp --trials 8 --epochs 1 --method tpe --folder search",),
            "search/report.html", 1100),
    Picture("shrink", "What a small file holds, layer by layer",
            ("laconic shrink digits-mlp -o digits.lac --density 0.1 --bits 4 --budget 0.05 --rounds 2",
             "laconic inspect digits.lac"), None, 260),
    Picture("code", "The flow graph of a loop: data flow, control flow",
            ("laconic code graph sum.ll -o sum.svg",), "sum.svg", 640),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names, joined by commas", default=",".join(each.name for each in GALLERY))
    parser.add_argument("--looks", type=Path, help="a folder for narrow and dark pictures of the same pages")
    chosen = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("the gallery needs Chromium: apt-get install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sum.ll").write_text(PROGRAM)
        for each in GALLERY:
            if each.name in chosen.only.split(","):
                page = drawn(each, folder)
                take(browser, page, PICTURES / f"{each.name}.png", each.height)
                if chosen.looks:
                    for width in (1200, 420):
                        for scheme in ("light", "dark"):
                            target = chosen.looks / f"{each.name}-{width}-{scheme}.png"
                            take(browser, page, target, each.height, width, scheme)
                print(f"{each.name}: {PICTURES / each.name}.png", flush=True)
    write_page()


def drawn(picture: Picture, folder: Path) -> Path:
    """Run the commands; returns the page they made."""
    printed = ""
    for command in picture.commands:
        line = command.format(link=" --link 100mbit" if os.geteuid() == 0 else "")
        done = subprocess.run(
            f"{sys.executable} -m {line}", shell=True, cwd=folder, capture_output=True, text=True, timeout=400
        )
        if done.returncode != 0:
            sys.exit(f"{line}: {done.stderr}")
        printed = f"$ {line}\n\n{done.stdout}"
    if picture.page is not None and picture.figure:
        return alone(folder / picture.page, picture.figure)
    if picture.page is not None:
        return folder / picture.page
    page = folder / f"{picture.name}.html"
    rows = (html.escape(row).replace("\t", "<td>") for row in printed.splitlines())
    style = "body { font: 16px monospace; margin: 2em } td { padding-right: 1.2em }"
    page.write_text(f"<meta charset=utf-8><style>{style}</style><table><tr><td>{'<tr><td>'.join(rows)}</table>")
    return page


def alone(page: Path, figure: str) -> Path:
    """A page with the report's style and nothing but one figure of it."""
    text = page.read_text()
    head, begin = text[: text.index("<body")], text.index(f"<h3 id='{figure}'>")
    cut = page.with_name(f"{figure}.html")
    cut.write_text(f"{head}<body><main>{text[begin : text.index('</figure>', begin)]}</figure></main></body></html>")
    return cut


def take(browser: str, page: Path, target: Path, height: int, width: int = 1200, scheme: str = "light") -> None:
    """A picture of the page, at half its size."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, *CHROMIUM, f"--user-data-dir={profile}", f"--window-size={width},{height}",
             "--virtual-time-budget=4000", "--force-device-scale-factor=0.6",
             f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
             f"--screenshot={target}", page.resolve().as_uri()],
            check=True, capture_output=True, timeout=90,
        )  # fmt: skip


def write_page() -> None:
    """docs/research/gallery.md, from what is listed above."""
    told = "What the commands draw, each with the command under it. A click shows a picture in full size. "
    told += "`make gallery` draws them again; it needs Chromium."
    parts = ["# Gallery", "", told]
    for each in GALLERY:
        lines = [command.format(link=" --link 100mbit") for command in each.commands]
        picture = f"gallery/{each.name}.png"
        parts += ["", f"## {each.title}", "", f"[![{each.title}]({picture})]({picture})", "", "```sh", *lines, "```"]
    (ROOT / "docs" / "research" / "gallery.md").write_text("\n".join(parts) + "\n")
