"""Files that are whole or not there, and JSON that may be damaged."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from laconic.errors import PayloadError, StorageError
from laconic.storage.files import append, create, replace, replacing
from laconic.storage.json_text import parse, parse_lines, read_lines
from tests.full_disk import files_of_at_most


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = replace(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        replace(path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("operation", ["fsync", "chmod", "replace"])
def test_a_crash_in_any_operation_keeps_the_old_file(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = replace(tmp_path / "file", "old")

    def crash(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, operation, crash)
    with pytest.raises(OSError, match="the disk is gone"), replacing(path) as file:
        file.write(b"new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_replaced_file_can_be_read_by_others_and_its_folder_is_made(tmp_path: Path) -> None:
    path = replace(tmp_path / "a" / "b", "text")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_of_many_creators_one_wins_and_its_text_stays(tmp_path: Path) -> None:
    won: list[int] = []

    def race(number: int) -> None:
        if create(tmp_path / "view", str(number)):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (tmp_path / "view").read_text() == str(won[0])
    assert [p.name for p in tmp_path.iterdir()] == ["view"]


def _write(path: Path) -> None:
    replace(path, "new" * 4000)


def _create(path: Path) -> None:
    create(path.with_name("created"), "new" * 4000)


def _append(path: Path) -> None:
    append(path, ["new" * 4000])


@pytest.mark.parametrize(("write", "says"), [
    (_write, "file cannot be written: File too large; the file that was there is intact"),
    (_create, "created cannot be written: File too large; nothing of it is there"),
    (_append, "file cannot be written: File too large; the lines before are intact"),
])  # fmt: skip
def test_a_disk_that_takes_no_more_is_one_sentence_and_what_was_there_stays(
    tmp_path: Path, write: Callable[[Path], None], says: str
) -> None:
    append(tmp_path / "file", ['{"step": 1}'])
    with pytest.raises(StorageError, match=re.escape(says)) as failed, files_of_at_most(8000):
        write(tmp_path / "file")
    assert failed.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert list(read_lines(tmp_path / "file")) == [{"step": 1}]
    append(tmp_path / "file", ['{"step": 2}'])  # what was left of a line does not spoil the next
    assert list(read_lines(tmp_path / "file")) == [{"step": 1}, {"step": 2}]


def test_a_folder_that_cannot_be_made_is_the_same_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"file/record cannot be written: .*; there was no such file before"):
        replace(tmp_path / "file" / "record", "text")


def test_an_error_of_the_block_that_writes_is_not_the_disk_s(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), replacing(tmp_path / "file"):
        raise ConnectionResetError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b"[" * 100_000, b"9" * 400, b"-" + b"9" * 5_000, b'"\xff"', b"\xff\xfe[\x00]\x00", b"{}{}"]
)
def test_damaged_json_gives_one_kind_of_error(damaged: bytes) -> None:
    with pytest.raises(PayloadError, match="not whole JSON"):
        parse(damaged)
    assert list(parse_lines(damaged + b'\n{"step": 1}\n')) == [{"step": 1}]


def test_lines_of_a_file_leave_out_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert list(read_lines(path)) == []
    append(path, ['{"a": 1}'])
    path.write_text(path.read_text() + '{"b')  # cut off
    append(path, ["[1]", '{"c": 3}'])
    append(path, [])
    assert list(read_lines(path)) == [{"a": 1}, {"c": 3}]
    with pytest.raises(PayloadError, match="cannot be read: Is a directory"):
        list(read_lines(tmp_path))


def test_a_created_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "link"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (done.append(name), real(*given))[1])
    assert create(tmp_path / "view", "text")
    assert done == ["fsync", "link", "fsync"], "the text, the name, the folder"
