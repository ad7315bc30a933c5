"""Classification of programs: a folder of folders, one for each class, is enough.

Callers: `laconic code classify`, `laconic bench code`. Every class is divided over the folds alike; a program is
predicted by a forest that has seen the other folds. The embedding is trained on all programs, without their classes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from laconic.comprehension.corpus import Progress, find_files, read_all
from laconic.comprehension.programs import TREES, Labels, cross_predict, ways
from laconic.errors import BadInput

METHOD = "embedding"
PUBLISHED = {"accuracy": 0.9483}  # POJ-104, 104 classes


def run(
    folder: str | Path,
    folds: int = 5,
    seed: int = 0,
    trees: int = TREES,
    cache: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Accuracy of every way with its interval, and the confusion matrix of our embedding.

    Returns:
        classes, programs, skipped files with reasons, results, and `confusion`: rows are true classes, columns
        predicted ones.

    Raises:
        BadInput: fewer than two classes, or a class with fewer programs than folds.
    """
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"{root} is no folder; give one that has a folder of programs for each class")
    if folds < 2:
        raise BadInput(f"folds are 2 or more, got {folds}")
    files = [path for path in find_files([root]) if path.parent != root]
    if not files:
        raise BadInput(f"{root} has no folders with programs; the folders' names are the classes")
    corpus = read_all(files, cache, progress)
    names = [path.relative_to(root).parts[0] for path in corpus.paths]
    classes, counts = sorted(set(names)), Counter(names)
    if len(classes) < 2:
        raise BadInput(f"{root} has programs of {len(classes)} class; two or more are needed")
    rare = min(classes, key=counts.__getitem__)
    if counts[rare] < folds:
        raise BadInput(f"class {rare} has {counts[rare]} programs that can be read, and {folds} folds need as many")
    labels = np.array([classes.index(name) for name in names])
    places = divided(labels, folds, seed)
    results, confusion = [], np.zeros((len(classes), len(classes)), dtype=np.int64)
    for method, features in ways(corpus.graphs, seed).items():
        predicted = cross_predict(features, labels, places, seed, trees)
        results.append({"task": "classification", "platform": root.name, "method": method, "folds": f"{folds} folds",
                        **accuracy(predicted == labels, places), "published": PUBLISHED})  # fmt: skip
        if method == METHOD:
            np.add.at(confusion, (labels, predicted), 1)
    return {"classes": classes, "programs": len(labels), "skipped": [list(each) for each in corpus.skipped],
            "results": results, "confusion": confusion.tolist()}  # fmt: skip


def divided(labels: Labels, folds: int, seed: int) -> Labels:
    """The fold of each program; each class is spread over all folds."""
    random = np.random.default_rng(seed)
    found = np.empty_like(labels)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        found[members] = (np.arange(len(members)) + label) % folds
    return found


def accuracy(right: np.ndarray[Any, np.dtype[np.bool_]], places: Labels) -> dict[str, Any]:
    """The share that is right, with a 95 % interval of Student's t over the folds."""
    from scipy.stats import t

    shares = np.array([right[places == fold].mean() for fold in np.unique(places)])
    half = float(t.ppf(0.975, len(shares) - 1) * shares.std(ddof=1) / np.sqrt(len(shares)))
    whole = float(right.mean())
    return {"accuracy": whole, "interval": [max(0.0, whole - half), min(1.0, whole + half)]}
