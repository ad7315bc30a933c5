"""Programs as rows of numbers, by an embedding or by the controls that tell what it is worth.

Callers: the tasks. Within a task the ways are followed by the same classifier, so that a difference between two rows of
a table is a difference between what the classifier was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from laconic_code.embedding import UNKNOWN, Embedding, Integers, context_pairs, normalised, vocabulary_of
from laconic_code.graph import KINDS, FlowGraph
from laconic_code.skipgram import Training, train
from laconic_code.statements import operation

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Labels = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Sparse = Any  # scipy.sparse.csr_array, which has no types
TREES = 200
MOST_PAIRS = 5_000_000  # of one pass over a task's own embedding: more have changed no figure, and cost minutes


def mean_vectors(rows: Sequence[np.ndarray[Any, Any]], vectors: Floats) -> Matrix:
    """The mean of each program's vectors, each of length 1, and the logarithm of its number of statements."""
    unit = normalised(vectors)
    means = np.stack([unit[each].mean(axis=0) for each in rows]).astype(np.float64)
    return np.column_stack([means, np.log([len(each) for each in rows])])


def random_vectors(size: int, dim: int, seed: int) -> Floats:
    """The control without training: a random direction for each statement."""
    return np.random.default_rng(seed).standard_normal((size, dim)).astype(np.float32)


def bag(rows: Sequence[np.ndarray[Any, Any]], size: int) -> Sparse:
    """The control without vectors: the logarithm of 1 + how often each statement occurs, a sparse row a program."""
    place = np.repeat(np.arange(len(rows), dtype=np.int32), [len(each) for each in rows])
    columns = np.concatenate(rows).astype(np.int32)  # classifiers read no longer ones
    found = sparse.coo_array((np.ones(len(place)), (place, columns)), (len(rows), size)).tocsr()  # adds up equal ones
    found.data = np.log1p(found.data)
    return found


def edge_bag(rows: Sequence[np.ndarray[Any, Any]], graphs: Sequence[FlowGraph], size: int) -> Sparse:
    """The flow graph without vectors: how often each kind of edge joins each two statements, as `bag` counts.

    Edges that occur once in all programs are left out.
    """
    keys = [(row[graph.edges[:, 0]].astype(np.int64) * size + row[graph.edges[:, 1]]) * len(KINDS) + graph.edges[:, 2]
            for row, graph in zip(rows, graphs, strict=True)]  # fmt: skip
    names, numbers, total = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
    found = bag(np.split(numbers, np.cumsum([len(each) for each in keys])[:-1]), len(names))
    return found[:, total > 1]


def counts(programs: Sequence[Sequence[str]]) -> Sparse:
    """The control that knows operations alone: the logarithm of 1 + how often each of them (add, load, …) occurs."""
    operations = [[operation(statement) for statement in program] for program in programs]
    names = {name: number for number, name in enumerate(sorted({each for program in operations for each in program}))}
    return bag([np.array([names[each] for each in program]) for program in operations], len(names))


def unknown_share(rows: Sequence[np.ndarray[Any, Any]], embedding: Embedding) -> float:
    """The part of all statements that have the row of the unknown ones."""
    unknown = embedding.vocabulary[UNKNOWN]
    return float(np.mean(np.concatenate(rows) == unknown))


def own_embedding(
    graphs: Sequence[FlowGraph], seed: int, dim: int = 100, epochs: int = 3, folder: Path | None = None
) -> Embedding:
    """An embedding trained on the graphs at hand, without labels; contexts of distance 2, as in the paper.

    Statements that occur once share the row of the unknown ones. A folder keeps the vectors after every epoch.
    """
    vocabulary = vocabulary_of([graph.abstracted for graph in graphs], cutoff=2)
    pairs = sampled_pairs(graphs, vocabulary, seed)
    how = Training(dim=dim, epochs=epochs, seed=seed)
    return Embedding(vocabulary, train(pairs, len(vocabulary), how, folder=folder))


def sampled_pairs(graphs: Sequence[FlowGraph], vocabulary: Mapping[str, int], seed: int) -> Integers:
    """The graphs' context pairs of distance 2; of many graphs a random part, of about MOST_PAIRS."""
    random = np.random.default_rng(seed)
    edges = sum(len(graph.edges) for graph in graphs)
    first = graphs[:: max(1, len(graphs) // 200)]
    per_edge = sum(len(context_pairs(graph, vocabulary)) for graph in first) / sum(len(graph.edges) for graph in first)
    share = MOST_PAIRS / (per_edge * edges)
    some = (context_pairs(graph, vocabulary, seed=seed) for graph in graphs)
    return np.concatenate([each if share >= 1 else each[random.random(len(each)) < share] for each in some])


def linear(seed: int) -> Any:
    """The classifier behind every way of `classify`: a linear support vector machine for each class."""
    from sklearn.svm import LinearSVC

    return LinearSVC(C=1.0, dual="auto", tol=1e-2, random_state=seed)


def forest(seed: int, trees: int = TREES) -> Any:
    """Extremely randomised trees."""
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(trees, random_state=seed, n_jobs=1)


def cross_predict(features: Any, labels: Labels, folds: Labels, model: Callable[[], Any]) -> Labels:
    """What is predicted for each row by a model that has seen only the other folds."""
    found = np.empty_like(labels)
    for fold in np.unique(folds):
        test = np.flatnonzero(folds == fold)
        train = np.flatnonzero(folds != fold)
        found[test] = model().fit(features[train], labels[train]).predict(features[test])
    return found


@dataclass(frozen=True)
class Ways:
    """Programs as rows of numbers by every way, and the share of statements that a way's vocabulary does not have.

    Args:
        read: for the ways that have vectors, what a network reads: programs as numbers of statements, and the vectors.
    """

    embedding: Embedding
    rows: list[Integers]
    features: dict[str, Matrix | Sparse]
    unknown: dict[str, float]
    read: dict[str, tuple[Sequence[Integers], Floats]]

    def add_published(self, rows: Sequence[Integers], published: Embedding) -> None:
        """The published embedding as one more way; `rows` number the programs' statements in its vocabulary."""
        self.features["published embedding"] = mean_vectors(rows, published.vectors)
        self.unknown["published embedding"] = unknown_share(rows, published)
        self.read["published embedding"] = rows, published.vectors


def ways(graphs: Sequence[FlowGraph], seed: int, folder: Path | None = None) -> Ways:
    """Programs by our embedding, whose epochs a folder keeps, and by the controls that need nothing else."""
    own = own_embedding(graphs, seed, folder=folder)
    rows = [own.rows(graph.abstracted) for graph in graphs]
    size, dim = own.vectors.shape
    statements = bag(rows, size)
    read: dict[str, tuple[Sequence[Integers], Floats]] = {
        "embedding": (rows, own.vectors), "random embedding": (rows, random_vectors(size, dim, seed)),
    }  # fmt: skip
    features = {
        "bag of statements": statements,
        "bag of statements and edges": sparse.hstack([statements, edge_bag(rows, graphs, size)], format="csr"),
        **{way: mean_vectors(*each) for way, each in read.items()},
        "raw counts": counts([graph.abstracted for graph in graphs]),
    }
    share = unknown_share(rows, own)
    return Ways(own, rows, features, {way: share for way in features if way != "raw counts"}, read)


def dense(features: Any) -> Matrix:
    """The same numbers as an array."""
    found: Matrix = features.toarray() if sparse.issparse(features) else features
    return found
