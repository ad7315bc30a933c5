"""Reuters RCV1-v2 as a two-class problem on sparse features: 47,236 term weights, labels 0 and 1.

Source: Lewis, Yang, Rose, Li, RCV1: A New Benchmark Collection, JMLR 5, 2004. Two forms are read: svmlight text with
labels ±1 (`rcv1_train.libsvm`, `rcv1_test.libsvm`: 1,000 + 500 documents), or the published training vectors with the
topic file (23,149 documents), as scikit-learn's `fetch_rcv1` downloads them.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor

from laconic.errors import PayloadError
from laconic.workloads.data.catalogue import dataset
from laconic.workloads.data.collection import Collection, File, gunzip
from laconic.workloads.data.split import Dataset, SparseRows, Split, held_out

FEATURES = 47_236
TRAIN, TEST = "rcv1_train.libsvm", "rcv1_test.libsvm"
VECTORS, TOPICS = "lyrl2004_vectors_train.dat.gz", "rcv1v2.topics.qrels.gz"
POSITIVE, NEGATIVE = (b"CCAT", b"ECAT"), (b"GCAT", b"MCAT")  # corporate and economics, against government and markets
TEST_FRACTION = 0.2

SAMPLE = Collection(
    "rcv1",
    "RCV1",
    (
        File(TRAIN, "2eb4d314d5bf1914c1798291f229200dee41e1a1e4334e1713302f3535f8413a"),
        File(TEST, "b342d44ba7f03229a0e53abe8d7820c1513016a746cf904286b19b447f72217e"),
    ),
)
# Checksums of the compressed files: the published ones.
PUBLISHED = Collection(
    "rcv1",
    "RCV1",
    (
        File(
            VECTORS,
            "5468f656d0ba7a83afc7ad44841cf9a53048a5c083eedc005dcdb5cc768924ae",
            ("https://ndownloader.figshare.com/files/5976057",),
        ),
        File(
            TOPICS,
            "2a98e5e5d8b770bded93afc8930d88299474317fe14181aee1466cc754d0d1c1",
            ("https://ndownloader.figshare.com/files/5976048",),
        ),
    ),
)


@dataset("rcv1", SAMPLE, PUBLISHED)
def rcv1(contents: dict[str, bytes], source: str) -> Dataset:
    """RCV1, from whichever of its two forms was found."""
    if TRAIN in contents:
        train, test = (_signed(contents[name], name) for name in (TRAIN, TEST))
        title = f"RCV1 ({len(train):,} + {len(test):,} documents)"
        return Dataset("rcv1", title, source, train, test)
    rows, documents = svmlight(gunzip(contents[VECTORS], VECTORS), VECTORS, FEATURES)
    labels = topic_labels(gunzip(contents[TOPICS], TOPICS), documents)
    kept = torch.nonzero(labels >= 0).reshape(-1)
    train_numbers, test_numbers = held_out(len(kept), TEST_FRACTION)
    train, test = (Split(_rows(rows, kept[n]), labels[kept[n]].float()) for n in (train_numbers, test_numbers))
    return Dataset("rcv1", f"RCV1-v2 ({len(train):,} + {len(test):,} documents)", source, train, test)


def _signed(content: bytes, name: str) -> Split:
    rows, labels = svmlight(content, name, FEATURES)
    if not bool(((labels == 1) | (labels == -1)).all()):
        raise PayloadError(f"{name} has labels other than 1 and -1")
    return Split(rows, (labels > 0).float())


def svmlight(content: bytes, name: str, width: int) -> tuple[SparseRows, Tensor]:
    """Sparse rows and float64 labels from svmlight text, `label column:value …` with columns from 1 to `width`."""
    from sklearn.datasets import load_svmlight_file

    try:
        matrix, labels = load_svmlight_file(io.BytesIO(content), n_features=width, dtype=np.float64, zero_based=False)
    except (ValueError, OverflowError) as error:
        raise PayloadError(f"{name} is not svmlight text with columns 1 to {width}: {error}") from error
    if not np.isfinite(matrix.data).all() or not np.isfinite(labels).all() or not len(labels):
        raise PayloadError(f"{name} holds no rows, or a value that is not finite")
    rows = SparseRows(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(matrix.data.astype(np.float32)),
        width,
    )
    return rows, torch.from_numpy(labels)


def topic_labels(topics: bytes, documents: Tensor) -> Tensor:
    """1, 0 or −1 (neither or both) for each document number, from lines `TOPIC document 1`.

    >>> topic_labels(b"ECAT 7 1\\nC15 7 1\\nMCAT 8 1\\nCCAT 9 1\\nGCAT 9 1\\n", torch.tensor([7, 8, 9])).tolist()
    [1, 0, -1]
    """
    words = np.array(topics.split())
    if len(words) == 0 or len(words) % 3:
        raise PayloadError(f"{TOPICS} is not lines of topic, document and 1")
    try:
        numbers = words[1::3].astype(np.int64)
    except ValueError as error:
        raise PayloadError(f"{TOPICS}: {error}") from error
    wanted = documents.numpy().astype(np.int64)
    positive = np.isin(wanted, numbers[np.isin(words[0::3], POSITIVE)])
    negative = np.isin(wanted, numbers[np.isin(words[0::3], NEGATIVE)])
    return torch.from_numpy(np.where(positive == negative, -1, positive.astype(np.int64)))


def _rows(rows: SparseRows, numbers: Tensor) -> SparseRows:
    """The given rows as a matrix of their own."""
    batch = rows[numbers]
    end = torch.tensor([len(batch.columns)])
    return SparseRows(torch.cat([batch.offsets, end]), batch.columns, batch.values, rows.width)
