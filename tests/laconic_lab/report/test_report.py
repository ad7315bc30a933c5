"""The report: what it says, that it is well formed for any record, and what a browser makes of it."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from laconic import words
from laconic.cli import main
from laconic.errors import MissingExtra
from laconic.exchange.noise import ChosenLayer, Review
from laconic_lab.commands.compare import table as terminal_table
from laconic_lab.commands.compare import unsteady
from laconic_lab.lint import lint
from laconic_lab.records import metrics
from laconic_lab.records.record import Breakdown, Event, NoiseRecord, Record, TimeSpan
from laconic_lab.records.summary import make_claims, summarise
from laconic_lab.report import export, write_report
from laconic_lab.report.canvas import MARGIN, NARROW, WIDE
from laconic_lab.report.charts import ChartAxis, Series, Target, curves, ticks
from laconic_lab.report.figures import figures
from laconic_lab.report.style import DARK, DASHES, LIGHT, MARKERS, SERIES
from tests.laconic_lab.sample_records import compare_record

VOID = {"meta", "link", "br"}


def _html(record: Record, folder: Path) -> str:
    return write_report(record, folder).read_text(encoding="utf-8")


def _svgs(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


class _Balance(HTMLParser):
    """Fails on a tag that is closed out of turn or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag


def _check(text: str) -> None:
    balance = _Balance()
    balance.feed(text)
    assert balance.open == []
    for svg in _svgs(text):
        ElementTree.fromstring(svg)
        assert "nan" not in re.sub(r"<text.*?</text>|<title>.*?</title>|aria-label=\".*?\"", "", svg)


def _trials(record: Record, **fields: object) -> None:
    record.trials = [replace(trial, **fields) for trial in record.trials]  # type: ignore[arg-type]


def _empty(record: Record) -> None:
    record.trials, record.claims, record.finished = [], [], False


def _no_claims(record: Record) -> None:
    record.claims = []


def _loss(record: Record) -> None:
    record.workload = replace(record.workload, target_metric="test loss", target_accuracy=None)
    _trials(record, test_accuracy=None)


def _bits(record: Record) -> None:
    record.workload = replace(record.workload, target_metric="test bits per character", target_accuracy=0.2)


def _diverged(record: Record) -> None:
    curve = [replace(p, test_accuracy=math.nan, test_loss=math.inf) for p in record.trials[0].curve]
    record.trials[0] = replace(record.trials[0], test_accuracy=math.nan, curve=curve)


def _perfect(record: Record) -> None:
    record.trials = [
        replace(t, test_accuracy=1.0, curve=[*t.curve[:-1], replace(t.curve[-1], test_accuracy=1.0)])
        for t in record.trials
    ]


def _short(record: Record) -> None:
    record.trials = [replace(trial, curve=trial.curve[-1:]) for trial in record.trials]


def _failed(record: Record) -> None:
    record.trials[-1] = replace(record.trials[-1], failed="rank 2 was lost")
    record.claims = make_claims(record, "ddp")


def _nothing_measured(record: Record) -> None:
    _trials(record, curve=[], layers=[], breakdown=None, step_seconds=None, seconds_to_target=None)


def _many(record: Record) -> None:
    extra = [replace(record.configurations[1], name=f"none-{i}") for i in range(9)]
    record.configurations += extra
    record.trials += [replace(record.trials[1], configuration=c.name) for c in extra]


def _big_model(record: Record) -> None:
    layers = [replace(record.trials[0].layers[0], name=f"layer{i}") for i in range(300)]
    _trials(record, layers=layers)


def _noise(record: Record) -> None:
    """The codec that minds the loss: the second layer's noise has gone at the last review, of all layers the signal."""
    reviews = [
        Review(12, 5.0, 2.0, 3.0, 0.2, 0.15, 150, 4000),
        Review(40, 5.0, 1.0, 4.0, 0.1, 0.1, 250, 4000),
        Review(72, 4.0, -0.5, 4.5, 0.1, math.inf, 250, 4000),
    ]
    layers = [
        ChosenLayer(0, "0.weight", 900, 1.0, 3.0, 0.1, "int2", 240),
        ChosenLayer(1, "<b>", 100, 0.5, 0.0, 0.0, "none", 400),
    ]
    _trials(record, noise=NoiseRecord(0.2, reviews, layers))


CASES: dict[str, Callable[[Record], None]] = {
    "honest": lambda record: None, "empty": _empty, "no claims": _no_claims, "loss": _loss, "bits": _bits,
    "diverged": _diverged,
    "perfect": _perfect, "one evaluation": _short, "failed trial": _failed, "nothing measured": _nothing_measured,
    "many configurations": _many, "many layers": _big_model,
    "noise": _noise,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seeds", [1, 3])
def test_any_record_gives_a_well_formed_page(case: str, seeds: int, tmp_path: Path):
    record = compare_record(seeds)
    CASES[case](record)
    text = _html(record, tmp_path)
    _check(text)
    for configuration in record.configurations:
        assert escape(configuration.name) in text


def test_noise_error_and_bytes_are_drawn_over_the_reviews_with_the_layers_at_the_end(tmp_path: Path):
    record = compare_record(2)
    assert "noise-0" not in _html(record, tmp_path)
    _noise(record)
    record = Record.load(record.save(tmp_path))
    (chart, *_) = [each for each in figures(record, summarise(record)) if each.name.startswith("noise-")]
    assert chart.title == "Noise and error of ddp"
    for text in ("error, of the noise: 15 at 12", "bytes, of float32&#39;s: 6.25 at 72", "error allowed: 20.0"):
        assert text in chart.wide.replace("'", "&#39;").replace("\N{NARROW NO-BREAK SPACE}", " "), text
    assert "signal, of a worker's squared gradient: 20 at 40" in chart.wide
    assert "squared gradient: -" not in chart.wide  # below 0: no place on a logarithm
    assert [row[0] for row in chart.table] == ["layer", "0.weight", "<b>"]
    assert chart.table[1][5:] == ["int2", "240\N{NARROW NO-BREAK SPACE}B", "6.7\N{NARROW NO-BREAK SPACE}%"]
    text = _html(record, tmp_path)
    assert "By layer, at the end" in text
    assert "&lt;b&gt;" in text


def test_the_first_screen_says_what_fails(tmp_path: Path):
    record = compare_record()
    record.clock = replace(record.clock, includes_data_loading=False)
    text = _html(record, tmp_path)
    assert "1 of 28 honesty rules fail" in text
    assert text.index("Data were read before the clock started") < text.index("<nav") < text.index('id="results"')
    assert "No honesty rule fails" in _html(compare_record(), tmp_path)


def test_the_headline_has_accuracy_beside_speed(tmp_path: Path):
    record = compare_record()
    text = _html(record, tmp_path).replace("\N{NARROW NO-BREAK SPACE}", " ")
    table = text.split('id="headline"')[1].split("</table>")[0]
    row = next(part for part in table.split("<tr>") if "dynamic8" in part)
    claim = next(c for c in record.claims if c.configuration == "compress:dynamic8" and c.what == "time to target")
    assert f"{claim.ratio:.2f} ×" in row
    assert f"at {100 * (claim.accuracy or 0):.1f} % against {100 * (claim.baseline_accuracy or 0):.1f} %" in row
    assert "▲ better" in row
    for title in ("test accuracy", "time to 95 %", "time of a step", "sent per step", "speed-up over ddp", "verdict"):
        assert f"{title}</th>" in table


def test_who_is_quicker_but_misses_the_target_is_not_better(tmp_path: Path):
    record = compare_record()
    record.trials = [
        replace(each, seconds_to_target=None) if each.configuration == "compress:dynamic8" and each.seed == 0 else each
        for each in record.trials
    ]
    record.claims = make_claims(record, "ddp")
    table = _html(record, tmp_path).split('id="headline"')[1].split("</table>")[0]
    row = next(part for part in table.split("<tr>") if "dynamic8" in part)
    assert "target missed" in row
    assert "by 1 of 3 seeds" in row
    assert "better" not in row
    assert any("dynamic8" in line and line.endswith("target missed by 1 of 3 seeds") for line in terminal_table(record))


def test_record_report_and_lint_agree_on_who_is_quicker_but_less_accurate(tmp_path: Path):
    """Two and a half points of accuracy below the base, and every seed at the target."""
    record = compare_record()
    ours = "compress:dynamic8"
    for number, each in enumerate(record.trials):
        if each.configuration == ours:
            lower = (each.test_accuracy or 0) - 0.025
            curve = [*each.curve[:-1], replace(each.curve[-1], test_accuracy=lower)]
            record.trials[number] = replace(each, test_accuracy=lower, curve=curve)
    record.claims = make_claims(record, "ddp")
    assert {claim.verdict for claim in record.claims if claim.configuration == ours} == {"quicker but less accurate"}
    assert [finding.rule for finding in lint(record) if finding.verdict == "fail"] == []
    text = _html(record, tmp_path)
    row = next(part for part in text.split('id="headline"')[1].split("<tr>") if "dynamic8" in part)
    assert "quicker but less accurate" in row
    assert "better" not in row
    (line,) = [line for line in terminal_table(record) if ours in line]
    assert line.endswith("quicker but less accurate")


def test_a_record_that_calls_better_who_misses_the_target_fails_the_lint(tmp_path: Path):
    record = compare_record()
    ours = "compress:dynamic8"
    missing = [replace(each, seconds_to_target=None) if each.configuration == ours else each for each in record.trials]
    honest = replace(record, trials=missing)
    honest.claims = make_claims(honest, "ddp")
    verdicts = {claim.verdict for claim in honest.claims if claim.configuration == ours}
    assert verdicts == {"quicker but misses the target"}
    assert [finding.rule for finding in lint(honest) if finding.verdict == "fail"] == []
    flattering = replace(honest, claims=[claim for claim in record.claims if claim.what == "step time"])
    (broken,) = [finding for finding in lint(flattering) if finding.verdict == "fail"]
    assert "called better" in broken.evidence
    assert "misses the target" in broken.evidence


def test_steps_that_differ_much_by_seed_are_told():
    record = compare_record()
    first, *others = (replace(trial, step_seconds_median=0.01) for trial in record.trials)
    assert unsteady(replace(record, trials=[first, *others])) == []
    (sentence,) = unsteady(replace(record, trials=[replace(first, step_seconds_median=0.02), *others]))
    assert sentence.startswith(f"steps of {first.configuration} took 10.0 ms to 20.0 ms by seed")


def _places(drawn: str, kind: str = "text") -> dict[str, tuple[float, float]]:
    """Where the texts of a drawing stand."""
    found = ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}" + kind)
    return {each.text or "": (float(each.get("x", "nan")), float(each.get("y", "nan"))) for each in found}


def _ends(path: str) -> list[tuple[float, float]]:
    """The corners of a path."""
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


def test_the_words_on_the_target_line_stand_where_no_curve_crosses_them():
    """In the legend, above the plot: whatever the curve."""
    axis = ChartAxis("y", "linear", str)
    for line in ([(0.0, 0.5), (1.0, 0.52), (10.0, 0.9)], [(0.0, 0.1), (9.0, 0.5), (10.0, 0.52)]):
        drawn = curves([Series("a", 0, line)], axis, axis, WIDE, title="t", target=Target(0.5, "target 50 %")).svg()
        (path,) = re.findall(r'class="line"><path d="([^"]*)"', drawn)
        assert _places(drawn)["target 50 %"][1] < min(y for _, y in _ends(path)) - WIDE.font


def test_a_p_value_that_is_not_there_leaves_no_dash(tmp_path: Path):
    record = compare_record(seeds=2)
    text = write_report(record, tmp_path).read_text()
    assert "too few seeds to say" in text
    assert ", –</span>" not in text


def test_a_target_in_bits_is_drawn_in_nats_and_named_in_bits(tmp_path: Path):
    record = compare_record()
    _bits(record)
    assert record.workload.target_loss == pytest.approx(0.2 * math.log(2))
    text = _html(record, tmp_path)
    assert "time to 0.2 bits per character</th>" in text
    assert "target 0.2 bits per character</text>" in text
    assert "Test loss against time" in text
    assert "test accuracy (%)" not in text


def test_who_sends_more_than_float32_is_told_so(tmp_path: Path):
    record = compare_record()
    record.trials = [replace(t, sent_nbytes_per_step=3 * t.raw_nbytes_per_step) for t in record.trials]
    assert "3.00 times as much as float32" in _html(record, tmp_path)


def test_a_target_of_all_right_has_a_place(tmp_path: Path):
    """`--target 1`: an axis that is logarithmic in the error has none for no error."""
    record = compare_record()
    record.workload = replace(record.workload, target_accuracy=1.0)
    text = _html(record, tmp_path)
    assert "target 100" in text
    assert "nan" not in "".join(_svgs(text))


def test_table_and_charts_give_one_time_of_a_step(tmp_path: Path) -> None:
    record = compare_record()
    record.trials[0] = replace(record.trials[0], breakdown=Breakdown(0.5, 0.25, 0.25, 0.25, 0.25, 0.5))  # not its step
    text = _html(record, tmp_path)
    for row in summarise(record):
        assert row.step is not None
        if row.breakdown is not None:
            assert sum(vars(row.breakdown).values()) == pytest.approx(row.step.value)
        name, step = row.configuration.name, words.seconds(row.step.value)
        for figure in figures(record, summarise(record))[2:]:
            assert f">{step}<" in figure.wide, (name, figure.name)
    assert text


def test_every_chart_has_units_on_its_axes():
    record = compare_record()
    made = figures(record, summarise(record))
    assert [figure.name for figure in made] == ["time-to-accuracy", "accuracy-by-bytes", "step-time", "step-spread"]
    for figure in made:
        for drawing in (figure.wide, figure.narrow):
            titles = re.findall(r'class="axis-title"><text[^>]*>([^<]*)<', drawing)
            units = [title.split("(")[-1].rstrip(")").split(",")[0] for title in titles]
            assert units in (["%", "s"], ["%", "MB"], ["ms"]), (figure.name, titles)


def test_a_timeline_has_a_lane_for_the_training_and_one_for_each_bucket():
    record = compare_record()
    spans = [
        TimeSpan("training", "compute", 0.0, 0.5),
        TimeSpan("3.mlp", "wire", 0.25, 0.5),
        TimeSpan("3.mlp", "decode", 0.5, 0.5),
    ]
    trials = [replace(record.trials[0], timeline=spans), *record.trials[1:]]
    (made,) = [each for each in figures(record, summarise(replace(record, trials=trials))) if "timeline" in each.name]
    bars = re.findall(r'class="bar"><title>([^<]*)</title><path d="([^"]*)"', made.wide)
    ends = {tip.split(":")[0]: [min(x for x, _ in _ends(path)), max(x for x, _ in _ends(path))] for tip, path in bars}
    begin, middle = ends["training, compute"]
    length = middle - begin
    assert begin == 4.0
    assert ends["3.mlp, wire"] == pytest.approx([begin + length / 2, begin + 1.5 * length], abs=0.02)
    assert ends["3.mlp, decode"] == pytest.approx([middle, middle + length], abs=0.02)
    places = _places(made.wide)
    assert places["training"][1] < places["3.mlp"][1]


def test_a_part_of_a_timeline_that_nobody_knows_is_drawn_as_another(tmp_path: Path):
    """A record of another version may name one; its name stays readable."""
    record = compare_record()
    record.trials[0] = replace(record.trials[0], timeline=[TimeSpan("training", "<surprise>", 0.0, 0.5)])
    record.save(tmp_path)
    assert _run("report", str(tmp_path)) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "training, &lt;surprise&gt;: 500" in text
    _check(text)


def test_events_are_flagged_and_explained(tmp_path: Path):
    text = _html(compare_record(), tmp_path)
    assert text.count('class="flag"') == 2  # wide and narrow
    assert "<li>compress:dynamic8 (seed 1), step 130: worker 2 was lost and restarted</li>" in text
    assert "4 steps were done again" in text


def test_many_events_share_flags_and_every_one_is_listed(tmp_path: Path):
    record = compare_record(1)
    trial = record.trials[1]
    ends = [trial.seconds_total * share for share in (0.0, 0.1, 0.101, 0.102, 0.5, 0.9, 1.0, *[0.7] * 9, 2.0)]
    events = [Event(seconds, 5, 1, f"worker {number} was lost") for number, seconds in enumerate(ends)]
    record.trials[1] = replace(trial, events=events)
    record.trials[2] = replace(record.trials[2], events=[Event(trial.seconds_total * 0.7, 5, 1, "another was lost")])
    text = _html(record, tmp_path)
    for size in (WIDE, NARROW):
        drawing = text.split(f'class="chart {size.name}"')[1].split("</svg>")[0]
        flag = r'class="flag"><title>([^<]*)</title><path d="([^"]*)" style="([^"]*)"[^>]*><text[^>]*>([^<]*)<'
        drawn = re.findall(flag, drawing)
        numbers = [[int(number) for number in label.split("–")] for _, _, _, label in drawn]
        assert [numbers[0][0], numbers[-1][-1]] == [1, 18]
        assert all(left[-1] + 1 == right[0] for left, right in pairwise(numbers))
        assert sum(tip.count("was lost") for tip, *_ in drawn) == 18
        boxes = [[x for x, _ in _ends(path)] for _, path, _, _ in drawn]
        assert all(max(left) < min(right) for left, right in pairwise(boxes))
        assert min(boxes[0]) >= 0
        assert max(boxes[-1]) <= size.width
        lines = re.findall(r'class="event">(.*?)</g>', drawing)
        assert sum(line.count("<path") for line in lines) == 18
        assert any("var(--muted)" in style for _, _, style, _ in drawn)  # of several configurations
    assert "The 18 events by number" in text
    assert all(f"worker {number} was lost</li>" in text for number in range(17))


def test_series_differ_without_colour():
    assert len(set(DASHES)) == SERIES
    assert len(set(MARKERS)) == SERIES


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(scheme: dict[str, str]):
    """WCAG 2.2: 4.5 for words, 3 for lines."""
    need = {**dict.fromkeys(["ink", "muted", "bad", "good", "unsure", "link"], 4.5),
            **{f"s{i}": 3.0 for i in range(SERIES)}}  # fmt: skip
    for name, least in need.items():
        for page in ("page", "panel"):
            pair = sorted([_luminance(scheme[name]), _luminance(scheme[page])])
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (name, page)


def test_names_cannot_break_out_of_the_page(tmp_path: Path):
    record = compare_record()
    evil = "</title><script>alert('x')</script>&\""
    record.configurations[2] = replace(record.configurations[2], name=evil)
    ours = "compress:dynamic8"
    record.trials = [replace(t, configuration=evil) if t.configuration == ours else t for t in record.trials]
    record.workload = replace(record.workload, name=evil, model=evil, stopping_rule=evil)
    record.command, record.environment["cpu"] = evil, evil
    record.claims = make_claims(record, "ddp")
    text = _html(record, tmp_path)
    assert "<script" not in text
    _check(text)


def test_what_claims_and_rules_say_cannot_break_out_of_the_page(tmp_path: Path):
    """A hand-written record may call anything what is compared; a p value has a sign of its own."""
    record = compare_record()
    record.claims = [replace(claim, what=f"<i>{claim.what}") for claim in record.claims if claim.what == "step time"]
    record.claims += [replace(claim, p_value=1e-9) for claim in make_claims(record, "ddp")]
    record.workload = replace(record.workload, target_metric="test <i>bits", target_accuracy=0.9)
    record.trials = [replace(trial, weights_sha256="<i>") for trial in record.trials]
    text = _html(record, tmp_path)
    assert "<i>" not in text
    assert "p\N{NO-BREAK SPACE}<" not in text


def test_the_page_asks_for_nothing(tmp_path: Path):
    text = _html(compare_record(), tmp_path).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//[a-z]|@import|<script|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_a_curve_of_one_point_has_no_line():
    axis = ChartAxis("x (s)", "linear", str)
    drawing = curves([Series("a", 0, [(1.0, 2.0)])], axis, axis, WIDE, title="t").svg()
    ElementTree.fromstring(drawing)
    assert 'class="line"' not in drawing
    assert "<title>a: 2.0 at 1.0</title>" in drawing


def test_a_dollar_is_a_dollar():
    """Matplotlib would take what stands between two for a formula, and fail where it is none."""
    axis = ChartAxis("$x^ (s)$", "linear", str)
    drawing = curves([Series("$a^_$", 0, [(1.0, 2.0)])], axis, axis, WIDE, title="t").svg()
    assert {"$a^_$", "$x^ (s)$"} <= set(_places(drawing))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1e-9), (0.0, 3.0), (2.0, 2.7), (0.0, 123.4), (-3.0, 5.0)])
@pytest.mark.parametrize("scale", ["linear", "log", "error"])
def test_ticks_are_few_and_inside(low: float, high: float, scale: str):
    found = ticks(low, high, scale, 8)  # type: ignore[arg-type]
    assert len(found) <= 9
    assert found == sorted(set(found))


def test_csv_holds_what_the_record_holds(tmp_path: Path):
    record = compare_record()
    files = {path.name: list(csv.DictReader(path.open())) for path in export.write_csv(record, tmp_path)}
    assert {name: len(rows) for name, rows in files.items()} == {
        "summary.csv": 4, "claims.csv": 6, "trials.csv": 12, "curves.csv": 12 * 23, "layers.csv": 12 * 6,
    }  # fmt: skip
    assert float(files["trials.csv"][3]["step_seconds_median"]) == record.trials[3].step_seconds_median
    assert not [value for row in files["trials.csv"] for value in row.values() if value.startswith("[")]
    assert float(files["curves.csv"][-1]["test_accuracy"]) == record.trials[-1].curve[-1].test_accuracy
    record.trials, record.claims = [], []
    for path in export.write_csv(record, tmp_path):
        assert path.read_text().startswith("config")


def _run(*words_: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words_))
    return int(ended.value.code or 0)


def test_report_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    compare_record().save(tmp_path / "run")
    assert _run("report", str(tmp_path / "run"), "--csv", "-o", str(tmp_path / "out"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {Path(name).name for name in found["files"]} == {path.name for path in (tmp_path / "out").iterdir()}
    assert Path(found["report"]).name == "report.html"


def test_charts_are_drawn_as_svg_and_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a browser: there is none on this PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    compare_record().save(tmp_path)
    assert _run("report", str(tmp_path), "--png", "--svg") == 0
    drawings = sorted(tmp_path.glob("*.svg"))
    assert len(drawings) == 4
    for drawing in drawings:
        root = ElementTree.fromstring(drawing.read_text(encoding="utf-8"))
        assert root.attrib["viewBox"].startswith(f"-{MARGIN} -{MARGIN} {WIDE.width + 2 * MARGIN} ")
        assert "--s0:" in drawing.read_text(encoding="utf-8")
        picture = drawing.with_suffix(".png").read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(picture[16:20], "big") == 2 * WIDE.width


def test_lint_command_says_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = compare_record()
    record.save(tmp_path)
    assert _run("lint", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "28 pass, 0 fail, 0 cannot know"
    record.finished, record.tuning_runs = False, None
    record.save(tmp_path)
    assert _run("lint", str(tmp_path), "--json") == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"pass": 26, "fail": 1, "cannot know": 1}
    (tmp_path / "run.json").write_text("{")
    assert _run("lint", str(tmp_path)) == 2


def test_tensorboard_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"laconic\[tensorboard\]"):
        export.write_tensorboard(tmp_path, tmp_path / "board")


def test_tensorboard_gets_every_number(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (1, 2, 3):
        metrics.add(tmp_path, trial="topk(0.01)/0", step=step, train_loss=1 / step, what="step")
    metrics.add(tmp_path, trial="ddp/0", step=1, train_loss=5.0, seconds=0.5)
    metrics.add(tmp_path, event="no step")
    assert export.write_tensorboard(tmp_path, tmp_path / "board") == 5
    events = EventAccumulator(str(tmp_path / "board" / "topk(0.01)_0")).Reload()
    assert [(s.step, s.value) for s in events.Scalars("train_loss")] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)),
    ]  # fmt: skip
    assert (tmp_path / "board" / "ddp_0").is_dir()


def test_narrow_drawings_are_narrow():
    assert NARROW.width < 390 < WIDE.width
