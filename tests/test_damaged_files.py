"""Every file of JSON that Laconic reads: a damaged one is refused by its typed error, or gives what was written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.consistency.elastic.meeting import Meeting, View, event, read_events
from laconic.errors import LaconicError, PayloadError, ProfileError, RecordError
from laconic.schedules import Link
from laconic.storage.json_text import SEAL
from laconic.transports.profile import FitResidual, Profile
from laconic_lab.records import metrics
from laconic_lab.records.record import Record
from laconic_lab.runs.elastic.journals import ExitRow, Journals
from tests.laconic_lab.sample_records import compare_record

VIEW = View(1, ((7, "127.0.0.1:5555:00"), (9, "127.0.0.1:6666:00")), "a job", 1.5)
ROWS = [ExitRow(1, index, 4000 + index, 1.5 + index, "was killed by SIGKILL", 10 * index) for index in range(4)]
EVENTS = [event(VIEW, step, 9, "lost: its connection broke", 1) for step in (3, 40)]
MEASURED = {"ring": ((400, 2e-3), (40_000, 3e-3))}
PROFILE = Profile(
    "gloo", 4, Link(1e-4, 1e-9), (FitResidual(1, 8, 1e-4, 1.1e-4),), MEASURED, ("höst",), "2026", {"a": "1"}
)


def _record(folder: Path) -> Path:
    return compare_record().save(folder)


def _profile(folder: Path) -> Path:
    PROFILE.save(folder / "link.json")
    return folder / "link.json"


def _view(folder: Path) -> Path:
    assert Meeting(folder).publish(VIEW)
    return folder / "view-00000001.json"


def _journal(folder: Path) -> Path:
    for row in ROWS:
        Journals(folder).exits.add(row)
    return folder / "exits.jsonl"


def _events(folder: Path) -> Path:
    Meeting(folder).record(EVENTS)
    return folder / "events.jsonl"


def _metrics(folder: Path) -> Path:
    for step in range(3):
        metrics.add(folder, trial=0, step=step, train_loss=0.5)
    return folder / metrics.FILE


# How each kind of file is written and read, and which error a damaged one gives. Damaged lines are left out instead.
WHOLE: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], type[LaconicError]]] = {
    "record": (_record, Record.load, RecordError),
    "profile": (_profile, lambda folder: Profile.load(folder / "link.json"), ProfileError),
    "view": (_view, lambda folder: Meeting(folder).newest(), PayloadError),
}
LINES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], list[Any]]]] = {
    "journal": (_journal, lambda folder: Journals(folder).exits.read()),
    "events": (_events, read_events),
}
SPOILT = [b"[" * 100_000, b"[" * 300 + b"]" * 300, b"9" * 400, b"-" + b"9" * 5_000, b'"\xff"', b"\xff\xfe", b"\0" * 64]


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("spoilt", SPOILT, ids=range(len(SPOILT)))
def test_a_spoilt_file_is_a_typed_error_that_names_it(kind: str, spoilt: bytes, tmp_path: Path) -> None:
    write, read, error = WHOLE[kind]
    path = write(tmp_path)
    whole = path.read_bytes()
    middle = whole.index(b":") + 1
    for damaged in (spoilt, whole[:middle] + spoilt + b"," + whole[middle:]):
        path.write_bytes(damaged)
        with pytest.raises(error, match=path.name) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [*LINES, "metrics"])
@pytest.mark.parametrize("spoilt", SPOILT, ids=range(len(SPOILT)))
def test_a_spoilt_line_is_left_out(kind: str, spoilt: bytes, tmp_path: Path) -> None:
    write, read = LINES.get(kind, (_metrics, lambda folder: list(metrics.read(folder))))
    path = write(tmp_path)
    first, *others = path.read_bytes().splitlines(keepends=True)
    expected = read(tmp_path)
    path.write_bytes(spoilt + b"\n" + first + b'{"rank": ' + spoilt + b"}\n" + b"".join(others))
    assert read(tmp_path) == expected
    path.write_bytes(spoilt)
    assert read(tmp_path) == []


@st.composite
def _changes(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """One to three changes: of a bit, a digit, a letter, or a stretch that is cut out, doubled or put elsewhere."""
    kinds = st.sampled_from(["bit", "digit", "letter", "cut", "double", "move"])
    drawn = draw(st.lists(st.tuples(kinds, st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3))

    def change(data: bytes) -> bytes:
        for kind, share, number in drawn:
            at = int(share * (len(data) - 1))
            if kind == "bit":
                data = data[:at] + bytes([data[at] ^ 1 << number % 8]) + data[at + 1 :]
            elif kind in ("digit", "letter"):
                wanted = b"0123456789" if kind == "digit" else b"abcdefghijklmnopqrstuvwxyz"
                places = [place for place in range(len(data)) if data[place] in wanted]
                place = places[int(share * (len(places) - 1))]
                data = data[:place] + wanted[number % len(wanted)].to_bytes(1, "little") + data[place + 1 :]
            else:
                stop = at + number % 40 + 1
                before, part, rest = data[:at], data[at:stop], data[stop:]
                data = {"cut": before + rest, "double": before + part + part + rest, "move": part + before + rest}[kind]
        return data

    return change


@lru_cache
def _written(kind: str) -> tuple[str, bytes, Any]:
    """A whole file: its name, its bytes, and what is read from it."""
    write, read = (WHOLE | LINES)[kind][:2]  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        return path.name, path.read_bytes(), read(Path(folder))


@pytest.mark.parametrize("kind", WHOLE)
@given(change=_changes())
@settings(max_examples=250)
def test_a_changed_file_is_refused_or_gives_what_was_written(kind: str, change: Callable[[bytes], bytes]) -> None:
    _, read, error = WHOLE[kind]
    name, data, expected = _written(kind)
    changed = change(data)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(changed)
        try:
            found = read(Path(folder))
        except error:
            return
    # A text that has lost its seal whole is one that somebody wrote by hand.
    assert found == expected or (kind != "view" and SEAL not in json.loads(changed))


def test_a_profile_whose_seal_is_cut_out_is_one_written_by_hand_and_one_whose_seal_is_misspelt_is_refused() -> None:
    text = _written("profile")[1].decode().replace('"world_size": 4', '"world_size": 3')
    body, _, seal = text.rpartition(',\n "seal"')
    assert Profile.from_json(body + "\n}").world_size == 3
    for damaged in (text, body + ',\n "sdal"' + seal):
        with pytest.raises(ProfileError):
            Profile.from_json(damaged)


@pytest.mark.parametrize("kind", LINES)
@given(change=_changes())
@settings(max_examples=250)
def test_of_changed_lines_only_those_are_read_that_were_written(kind: str, change: Callable[[bytes], bytes]) -> None:
    name, data, expected = _written(kind)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(change(data))
        assert all(row in expected for row in LINES[kind][1](Path(folder)))


def test_a_record_or_profile_without_a_seal_was_written_by_hand_and_is_read(tmp_path: Path) -> None:
    for kind in ("record", "profile"):
        write, read, error = WHOLE[kind]
        path = write(tmp_path)
        expected = read(tmp_path)
        lines = path.read_text().splitlines()
        assert lines[-2].startswith(' "seal": ')
        edited = "\n".join([*lines[:-3], lines[-3].removesuffix(","), "}"])
        path.write_text(edited)
        assert read(tmp_path) == expected
        path.write_text("\n".join(lines).replace("2026", "2027", 1))
        with pytest.raises(error, match='its seal does not fit; take out the line of "seal" if'):
            read(tmp_path)
