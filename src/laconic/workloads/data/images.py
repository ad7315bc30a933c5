"""The image datasets: scikit-learn's digits (the embedded default), MNIST, Fashion-MNIST and CIFAR-10.

Images are uint8 tensors (N, C, H, W); labels int64. A workload scales them when it makes a batch. Bytes that are
truncated, oversized or of another kind raise PayloadError with the file's name; nothing is read from a part of a file.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.errors import PayloadError
from laconic.workloads.data.catalogue import dataset
from laconic.workloads.data.collection import Collection, File
from laconic.workloads.data.split import Dataset, Split, held_out

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
DIGITS_TEST_FRACTION = 0.2
IDX_UINT8 = 0x08
CIFAR_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes


def _idx_files(checksums: tuple[str, ...], *addresses: str) -> tuple[File, ...]:
    return tuple(
        File(name, checksum, tuple(f"{address}/{name}.gz" for address in addresses))
        for name, checksum in zip(IDX_NAMES, checksums, strict=True)
    )


MNIST = Collection(
    "mnist",
    "MNIST",
    _idx_files(
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
)
FASHION = Collection(
    "fashion-mnist",
    "Fashion-MNIST",
    _idx_files(
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ),
    folders=("/usr/share/datasets/fashion-mnist",),  # Debian's dataset-fashion-mnist
)
CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
CIFAR10 = Collection(
    "cifar10",
    "CIFAR-10",
    (
        File(CIFAR_TRAIN[0], "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File(CIFAR_TRAIN[1], "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File(CIFAR_TRAIN[2], "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File(CIFAR_TRAIN[3], "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File(CIFAR_TRAIN[4], "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        File(CIFAR_TEST, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    archives=("cifar-10-binary.tar.gz", "cifar-10-batches-bin.tar.xz"),
    archive_urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)


@dataset("digits")
def digits() -> Dataset:
    """1,797 real 8×8 digits bundled with scikit-learn, 16 grey levels, a fixed fifth of them held out for testing."""
    rows = torch.from_numpy(_digits_rows())
    x, y = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].long()
    train, test = held_out(len(y), DIGITS_TEST_FRACTION)
    title = "scikit-learn's digits (UCI, 8×8)"
    return Dataset("digits", title, "scikit-learn", Split(x[train], y[train]), Split(x[test], y[test]))


def _digits_rows() -> NDArray[np.uint8]:
    """64 pixels and the digit a row, from scikit-learn's own file: importing the library takes a process 1.5 s.

    Where the file is not in its place, the library is asked.
    """
    found = importlib.util.find_spec("sklearn")
    folders = [] if found is None else found.submodule_search_locations or []
    for path in (Path(folder) / "datasets" / "data" / "digits.csv.gz" for folder in folders):
        if path.exists():
            return np.loadtxt(path, dtype=np.uint8, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels]).astype(np.uint8)


@dataset("mnist", MNIST)
def mnist(contents: dict[str, bytes], source: str) -> Dataset:
    """MNIST: 60,000 + 10,000 handwritten digits of 28×28 grey pixels."""
    return _idx_dataset("mnist", "MNIST", contents, source)


@dataset("fashion", FASHION)
def fashion(contents: dict[str, bytes], source: str) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 articles of clothing of 28×28 grey pixels."""
    return _idx_dataset("fashion", "Fashion-MNIST", contents, source)


@dataset("cifar10", CIFAR10)
def cifar10(contents: dict[str, bytes], source: str) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 photographs of 32×32 colour pixels in 10 classes."""
    batches = [cifar(contents[name], name) for name in CIFAR_TRAIN]
    images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    test = cifar(contents[CIFAR_TEST], CIFAR_TEST)
    return Dataset("cifar10", "CIFAR-10", source, Split(images, labels.long()), Split(test[0], test[1].long()))


def _idx_dataset(name: str, title: str, contents: dict[str, bytes], source: str) -> Dataset:
    train = _idx_split(contents, *IDX_NAMES[:2])
    test = _idx_split(contents, *IDX_NAMES[2:])
    return Dataset(name, title, source, train, test)


def _idx_split(contents: dict[str, bytes], images: str, labels: str) -> Split:
    x: Tensor = idx(contents[images], images)
    y: Tensor = idx(contents[labels], labels)
    if x.dim() != 3 or y.shape != x.shape[:1]:
        raise PayloadError(f"{images} has shape {tuple(x.shape)} and {labels} {tuple(y.shape)}: not images and labels")
    return Split(x.unsqueeze(1), y.long())


def idx(content: bytes, name: str) -> Tensor:
    """A uint8 tensor from an idx file: 0, 0, type, dimensions, then each size as 4 big-endian bytes, then the values.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), "labels").tolist()
    [5, 7]
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != IDX_UINT8 or content[3] < 1:
        raise PayloadError(f"{name} is not an idx file of bytes: it starts with {content[:4].hex(' ') or 'nothing'}")
    header = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:header], dtype=">u4"))
    if len(shape) != content[3] or len(content) - header != math.prod(shape):
        raise PayloadError(
            f"{name} is truncated or has extra bytes: its header says {' × '.join(map(str, shape))} values, "
            f"{max(len(content) - header, 0)} follow"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy())


def cifar(content: bytes, name: str) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels (N), both uint8, from a CIFAR-10 binary batch."""
    if not content or len(content) % CIFAR_RECORD:
        raise PayloadError(f"{name} has {len(content)} bytes, not a multiple of CIFAR's {CIFAR_RECORD}-byte records")
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, CIFAR_RECORD).copy())
    labels = records[:, 0]
    if int(labels.max()) > 9:
        raise PayloadError(f"{name} holds label {int(labels.max())}; CIFAR-10 has labels 0 to 9")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels
