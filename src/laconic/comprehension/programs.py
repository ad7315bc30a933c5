"""Programs as rows of numbers, by an embedding or by the controls that tell what it is worth.

Callers: the tasks. Every way is followed by the same forest, so that a difference between two rows of a table is a
difference between what the forest was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from laconic.comprehension.embedding import Embedding, context_pairs, normalised, vocabulary_of
from laconic.comprehension.graph import FlowGraph
from laconic.comprehension.skipgram import Training, train

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Labels = np.ndarray[Any, np.dtype[np.int64]]
TREES = 200


def mean_vectors(rows: Sequence[np.ndarray[Any, Any]], vectors: np.ndarray[Any, np.dtype[np.float32]]) -> Matrix:
    """The mean of each program's vectors, each of length 1, and the logarithm of its number of statements."""
    unit = normalised(vectors)
    means = np.stack([unit[each].mean(axis=0) for each in rows]).astype(np.float64)
    return np.column_stack([means, np.log([len(each) for each in rows])])


def random_vectors(size: int, dim: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The control without training: a random direction for each statement."""
    return np.random.default_rng(seed).standard_normal((size, dim)).astype(np.float32)


def bag(rows: Sequence[np.ndarray[Any, Any]], size: int) -> Matrix:
    """The control without vectors: the logarithm of 1 + how often each statement occurs."""
    return np.log1p(np.stack([np.bincount(each, minlength=size) for each in rows]).astype(np.float64))


def own_embedding(graphs: Sequence[FlowGraph], seed: int, dim: int = 100, epochs: int = 3) -> Embedding:
    """An embedding trained on the graphs at hand, without labels; contexts of distance 2, as in the paper.

    Statements that occur once share the row of the unknown ones.
    """
    vocabulary = vocabulary_of([graph.abstracted for graph in graphs], cutoff=2)
    pairs = np.concatenate([context_pairs(graph, vocabulary) for graph in graphs])
    return Embedding(vocabulary, train(pairs, len(vocabulary), Training(dim=dim, epochs=epochs, seed=seed)))


def forest(seed: int, trees: int = TREES) -> Any:
    """The one classifier behind every way: extremely randomised trees."""
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(trees, max_features=0.3, random_state=seed, n_jobs=1)


def cross_predict(features: Matrix, labels: Labels, folds: Labels, seed: int, trees: int = TREES) -> Labels:
    """What is predicted for each row by a forest that has seen only the other folds."""
    found = np.empty_like(labels)
    for fold in np.unique(folds):
        test = folds == fold
        found[test] = forest(seed, trees).fit(features[~test], labels[~test]).predict(features[test])
    return found


def ways(graphs: Sequence[FlowGraph], seed: int) -> dict[str, Matrix]:
    """Programs by our embedding, by random vectors and as a bag of statements."""
    own = own_embedding(graphs, seed)
    rows = [own.rows(graph.abstracted) for graph in graphs]
    size, dim = own.vectors.shape
    return {
        "embedding": mean_vectors(rows, own.vectors),
        "random embedding": mean_vectors(rows, random_vectors(size, dim, seed)),
        "bag of statements": bag(rows, size),
    }
