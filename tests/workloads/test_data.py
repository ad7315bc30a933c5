"""Datasets: readers on small files written here, checks, downloads from a local address, and the order of samples."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from laconic.errors import BadInput, PayloadError, UnknownName
from laconic.workloads import data
from laconic.workloads.data import catalogue, images, rcv1
from laconic.workloads.data.collection import Collection, File
from laconic.workloads.data.download import download, placed
from laconic.workloads.data.split import held_out

CONTENT = b"the contents of a file"
REAL = os.environ.get("LACONIC_DATA")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def small(**changes: object) -> Collection:
    return replace(Collection("small", "Small", (File("a.bin", sha256(CONTENT)),)), **changes)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in a folder of its own, with no data folder named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LACONIC_DATA", raising=False)
    return tmp_path


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A local web address and the folder it serves."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


# Formats


def idx_bytes(values: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


def test_idx_gives_back_what_was_written() -> None:
    values = np.arange(24).reshape(2, 3, 4)
    assert images.idx(idx_bytes(values), "x").tolist() == values.tolist()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        b"\0\0\x08\x00",  # no dimension
        b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0",  # floats
        b"\0\0\x08\x02\0\0\0\x01",  # a size is missing
        b"\x1f\x8b\x08\x01abcd",  # gzip
        idx_bytes(np.arange(6).reshape(2, 3))[:-1],
        idx_bytes(np.arange(6).reshape(2, 3)) + b"\0",
    ],
)
def test_idx_refuses_anything_else(content: bytes) -> None:
    with pytest.raises(PayloadError, match="some-file"):
        images.idx(content, "some-file")


def test_cifar_gives_planes_and_labels() -> None:
    planes = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    content = b"".join(bytes([label]) + image.tobytes() for label, image in zip([7, 0, 9], planes, strict=True))
    x, y = images.cifar(content, "batch")
    assert torch.equal(x, torch.from_numpy(planes))
    assert y.tolist() == [7, 0, 9]


@pytest.mark.parametrize("content", [b"", b"\0" * 3072, b"\0" * 3074, b"\x0a" + b"\0" * 3072])
def test_cifar_refuses_other_sizes_and_labels(content: bytes) -> None:
    with pytest.raises(PayloadError, match="batch"):
        images.cifar(content, "batch")


def test_svmlight_counts_columns_from_one() -> None:
    rows, labels = rcv1.svmlight(b"-1 1:0.5 4:2\n1 3:1.5\n", "text", width=5)
    assert labels.tolist() == [-1, 1]
    batch = rows[torch.tensor([0, 1])]
    assert batch.columns.tolist() == [0, 3, 2]
    assert batch.values.tolist() == [0.5, 2.0, 1.5]


@pytest.mark.parametrize("content", [b"", b"1 6:1\n", b"1 0:1\n", b"1 a:b\n", b"1 1:nan\n", b"\x00\xff\xfe"])
def test_svmlight_refuses_what_it_cannot_hold(content: bytes) -> None:
    with pytest.raises(PayloadError, match="text"):
        rcv1.svmlight(content, "text", width=5)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=8), st.data())
@settings(max_examples=50)
def test_sparse_rows_are_gathered_like_dense_ones(columns: list[list[int]], draw: st.DataObject) -> None:
    starts = torch.tensor([0, *np.cumsum([len(row) for row in columns])])
    flat = torch.tensor([c for row in columns for c in row], dtype=torch.int64)
    rows = data.SparseRows(starts, flat, torch.arange(len(flat), dtype=torch.float32) + 1, 10)
    numbers = draw.draw(st.lists(st.integers(0, len(columns) - 1), max_size=6))
    batch = rows[torch.tensor(numbers, dtype=torch.int64)]
    stops = [*batch.offsets.tolist()[1:], len(batch.columns)] if numbers else []
    for number, start, stop in zip(numbers, batch.offsets.tolist(), stops, strict=True):
        assert batch.columns[start:stop].tolist() == columns[number]
        assert batch.values[start:stop].tolist() == rows.values[starts[number] : starts[number + 1]].tolist()


# Where files are found


@pytest.mark.parametrize("place", ["small", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_plain_and_compressed_files_are_found_in_a_named_folder(tmp_path: Path, place: str, packed: bool) -> None:
    folder = tmp_path / "mine" / place
    folder.mkdir(parents=True)
    path = folder / ("a.bin.gz" if packed else "a.bin")
    path.write_bytes(gzip.compress(CONTENT) if packed else CONTENT)
    contents, source = small().read(tmp_path / "mine") or ({}, "")
    assert contents == {"a.bin": CONTENT}
    assert source == str(folder.resolve())


def test_laconic_data_comes_before_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data", "mine"):
        (tmp_path / name / "small").mkdir(parents=True)
        (tmp_path / name / "small" / "a.bin").write_bytes(CONTENT)
    assert (small().read() or ("", ""))[1] == str(tmp_path / "data" / "small")
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path / "mine"))
    assert (small().read() or ("", ""))[1] == str(tmp_path / "mine" / "small")


def test_distributions_folders_come_last(tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "a.bin").write_bytes(CONTENT)
    collection = small(folders=(str(tmp_path / "system"),))
    assert (collection.read() or ("", ""))[1] == str(tmp_path / "system")
    assert collection.read(tmp_path) is None


@pytest.mark.parametrize("name", ["a.bin", "a.bin.gz"])
def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(CONTENT + b"!") if name.endswith("gz") else CONTENT[:-1])
    with pytest.raises(PayloadError, match=r"published a\.bin"):
        small().read(tmp_path)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin.gz").write_bytes(gzip.compress(CONTENT)[:-9])
    with pytest.raises(PayloadError, match="gzip"):
        small().read(tmp_path)


def tar_bytes(mode: str, content: bytes = CONTENT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:  # type: ignore[call-overload]
        for name, bytes_ in (("inner/readme", b"?"), ("inner/a.bin", content)):
            entry = tarfile.TarInfo(name)
            entry.size = len(bytes_)
            tar.addfile(entry, io.BytesIO(bytes_))
    return packed.getvalue()


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_archives_are_unpacked_once_and_never_beside_themselves(tmp_path: Path, mode: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "small.tar").write_bytes(tar_bytes(mode))
    collection = small(archives=("small.tar",))
    contents, source = collection.read(shared) or ({}, "")
    assert contents == {"a.bin": CONTENT}
    assert source == str(shared / "small.tar")
    assert sorted(path.name for path in shared.iterdir()) == ["small.tar"]
    assert [path.name for path in (tmp_path / "data" / "small").iterdir()] == ["a.bin"]


@pytest.mark.parametrize("content", [b"junk", tar_bytes("w:gz")[:-40], tar_bytes("w:gz", CONTENT + b"!")])
def test_a_bad_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "small.tar").write_bytes(content)
    with pytest.raises(PayloadError):
        small(archives=("small.tar",)).read(tmp_path)


# Downloads


def test_a_download_is_checked_and_put_in_place(address: tuple[str, Path], tmp_path: Path) -> None:
    url, served = address
    (served / "a.bin.gz").write_bytes(gzip.compress(CONTENT))
    collection = small(files=(File("a.bin", sha256(CONTENT), (f"{url}/absent.gz", f"{url}/a.bin.gz")),))
    assert collection.fetch() == f"{url}/a.bin.gz"
    assert [path.name for path in (tmp_path / "data" / "small").iterdir()] == ["a.bin.gz"]
    assert (collection.read() or ({}, ""))[0] == {"a.bin": CONTENT}


def test_downloads_go_to_laconic_data_unless_it_is_read_only(
    address: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served = address
    (served / "a.bin").write_bytes(CONTENT)
    collection = small(files=(File("a.bin", sha256(CONTENT), (f"{url}/a.bin",)),))
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.setenv("LACONIC_DATA", str(mine))
    mine.chmod(0o555)
    collection.fetch()
    assert (tmp_path / "data" / "small" / "a.bin").is_file()
    assert not list(mine.iterdir())
    mine.chmod(0o755)
    collection.fetch()
    assert (mine / "small" / "a.bin").is_file()


def test_a_downloaded_archive_leaves_only_its_members(address: tuple[str, Path], tmp_path: Path) -> None:
    url, served = address
    (served / "small.tar.gz").write_bytes(tar_bytes("w:gz"))
    small(archives=("small.tar.gz",), archive_urls=(f"{url}/small.tar.gz",)).fetch()
    assert [path.name for path in (tmp_path / "data" / "small").iterdir()] == ["a.bin"]


def test_a_wrong_download_leaves_nothing(address: tuple[str, Path], tmp_path: Path) -> None:
    url, served = address
    (served / "a.bin").write_bytes(CONTENT + b"!")
    collection = small(files=(File("a.bin", sha256(CONTENT), (f"{url}/a.bin",)),))
    with pytest.raises(PayloadError, match="published"):
        collection.fetch()
    assert list((tmp_path / "data" / "small").iterdir()) == []


def test_an_answer_cut_short_is_noticed(tmp_path: Path) -> None:
    class Cut(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Cut)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises((PayloadError, BadInput)):
        download((f"http://127.0.0.1:{server.server_port}/a",), tmp_path / "a", lambda path: None)
    server.shutdown()
    server.server_close()
    assert not (tmp_path / "a").exists()


def test_an_unreachable_address_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="could not be downloaded"):
        download(("http://127.0.0.1:9/a",), tmp_path / "a", lambda path: None)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), placed(tmp_path / "a") as temporary:  # noqa: PT012
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"before")]


# The catalogue


def test_a_missing_dataset_is_one_sentence_with_the_cure(tmp_path: Path) -> None:
    for arguments in ({"folder": tmp_path}, {"download": False}):
        with pytest.raises(BadInput) as caught:
            data.load("mnist", **arguments)
        message = str(caught.value)
        assert "MNIST is not in" in message
        assert "train-images-idx3-ubyte" in message
        assert "LACONIC_DATA" in message
        assert "\n" not in message


def test_a_dataset_that_cannot_be_reached_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(small(), files=(File("a.bin", "0" * 64, ("http://127.0.0.1:9/a.bin",)),))
    monkeypatch.setitem(catalogue.REGISTRY._entries, "small", (lambda contents, source: None, (nowhere,)))
    with pytest.raises(BadInput, match=r"Small is not in .*could not be downloaded"):
        data.load("small")


def test_unknown_datasets_and_folders() -> None:
    with pytest.raises(UnknownName, match="mnist"):
        data.load("mnits")
    with pytest.raises(BadInput, match="does not exist"):
        data.load("mnist", "no-such-folder")


def test_a_wrong_laconic_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_DATA", "no-such-folder")
    with pytest.raises(BadInput, match="LACONIC_DATA"):
        data.load("mnist", download=False)


def test_digits_are_scikit_learns_wherever_its_file_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = load_digits(return_X_y=True)
    rows = images._digits_rows()
    assert (rows[:, :-1] == pixels).all()
    assert (rows[:, -1] == labels).all()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (images._digits_rows() == rows).all()


def test_digits_are_split_once_and_for_all() -> None:
    digits = data.load("digits")
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.train.x.dtype == torch.uint8
    assert int(digits.train.x.max()) == 16
    assert sorted(set(digits.test.y.tolist())) == list(range(10))
    assert torch.equal(digits.test.x, data.load("digits").test.x)


def test_held_out_samples_are_disjoint_and_complete() -> None:
    train, test = held_out(101, 0.2)
    assert len(test) == 20
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(101))


def test_idx_datasets_from_bytes() -> None:
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 256, (5, 28, 28)), np.arange(5), random.integers(0, 256, (3, 28, 28)), np.arange(3)]
    contents = {name: idx_bytes(array) for name, array in zip(images.IDX_NAMES, arrays, strict=True)}
    mnist = images.mnist(contents, "here")
    assert mnist.train.x.shape == (5, 1, 28, 28)
    assert mnist.train.y.tolist() == [0, 1, 2, 3, 4]
    assert mnist.test.x[:, 0].tolist() == arrays[2].tolist()
    contents[images.IDX_NAMES[1]] = idx_bytes(np.arange(4))
    with pytest.raises(PayloadError, match="not images and labels"):
        images.mnist(contents, "here")


def test_shakespeare_targets_are_the_next_characters() -> None:
    from laconic.workloads.data.shakespeare import shakespeare

    text = b"abcdefghij" * 10
    windows = shakespeare({"input.txt": text}, "here", length=4)
    assert windows.train.x[0].tolist() == [0, 1, 2, 3]
    assert windows.train.y[0].tolist() == [1, 2, 3, 4]
    assert windows.train.x[1].tolist() == [4, 5, 6, 7]
    assert len(windows.train) == 22  # 90 characters: ⌊89 / 4⌋ windows that have a next character
    assert len(windows.test) == 2
    with pytest.raises(BadInput, match="window"):
        shakespeare({"input.txt": text}, "here", length=0)


def test_rcv1_in_both_forms() -> None:
    labelled = rcv1.rcv1({rcv1.TRAIN: b"-1 1:1\n1 2:1\n", rcv1.TEST: b"1 47236:1\n"}, "here")
    assert labelled.train.y.tolist() == [0, 1]
    assert labelled.test.x[torch.tensor([0])].columns.tolist() == [47_235]
    vectors = b"".join(b"%d  %d:0.5 %d:0.5\n" % (document, document, document + 1) for document in range(1, 11))
    topics = b"".join(b"%s %d 1\n" % (b"CCAT" if document % 2 else b"MCAT", document) for document in range(1, 10))
    contents = {rcv1.VECTORS: gzip.compress(vectors), rcv1.TOPICS: gzip.compress(topics)}
    published = rcv1.rcv1(contents, "there")
    assert len(published.train) + len(published.test) == 9  # document 10 has no topic
    for split in (published.train, published.test):
        for row in range(len(split)):
            column = int(split.x[torch.tensor([row])].columns[0])
            assert split.y[row] == (column + 1) % 2  # column j − 1 is document j's
    with pytest.raises(PayloadError, match="labels"):
        rcv1.rcv1({rcv1.TRAIN: b"3 1:1\n", rcv1.TEST: b"1 1:1\n"}, "here")
    with pytest.raises(PayloadError, match="gzip"):
        rcv1.rcv1({**contents, rcv1.TOPICS: topics}, "here")


@pytest.mark.parametrize("name", ["mnist", "shakespeare", "rcv1"])
def test_the_published_files_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        pytest.skip("LACONIC_DATA is not set: no real data on this machine")
    sizes = {"mnist": (60_000, 10_000), "shakespeare": (15_685, 1_742), "rcv1": (1_000, 500)}
    try:
        loaded = data.load(name, REAL)
    except BadInput as error:
        pytest.skip(str(error))
    assert (len(loaded.train), len(loaded.test)) == sizes[name]


# The order of samples


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9), st.integers(0, 2**31), st.integers(0, 5))
@settings(max_examples=100)
def test_an_epoch_uses_each_sample_once_and_steps_do_not_depend_on_ranks(
    samples: int, batch: int, ranks: int, seed: int, epoch: int
) -> None:
    order = data.EpochOrder(samples, batch, seed, epoch)
    used = []
    for step in range(order.steps):
        shares = [order.indices(step, rank, ranks) for rank in range(ranks)]
        together = torch.cat(shares)
        assert torch.equal(together, order.indices(step))
        assert len(together) == order.size(step)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        used += together.tolist()
    assert sorted(used) == list(range(samples))
    assert max(order.size(step) for step in range(order.steps)) <= batch
    again = data.EpochOrder(samples, batch, seed, epoch)
    assert torch.equal(again.indices(order.steps - 1), order.indices(order.steps - 1))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [data.EpochOrder(100, 100, seed, epoch).indices(0).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(("step", "rank", "ranks"), [(5, 0, 1), (-1, 0, 1), (0, 2, 2), (0, -1, 2)])
def test_steps_and_ranks_that_do_not_exist(step: int, rank: int, ranks: int) -> None:
    with pytest.raises(BadInput):
        data.EpochOrder(10, 2, 0, 0).indices(step, rank, ranks)


def test_an_epoch_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="samples"):
        data.EpochOrder(0, 2, 0, 0)
