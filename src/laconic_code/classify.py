"""Classification of programs: a folder of folders, one for each class, is enough.

Callers: `laconic code classify`, its benchmark. Every class is divided over the folds alike; a program is
predicted by a classifier that has seen the other folds. The embedding is trained on all programs, without their
classes. Every way goes to the same linear classifier, but for the raw counts, which go to a forest, and the networks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from laconic.errors import BadInput, UnknownName
from laconic.storage.memo import Memo
from laconic_code import archives, ir, networks
from laconic_code.array_memo import ARRAY
from laconic_code.corpus import Corpus, Progress, find_files, read_all
from laconic_code.programs import (
    TREES,
    Labels,
    Ways,
    cross_predict,
    dense,
    forest,
    linear,
    ways,
)

METHOD = "bag of statements and edges"
_VECTORS = ("embedding", "random embedding", "published embedding")
METHODS = ("bag of statements", METHOD, "raw counts with a forest", *_VECTORS,
           *(f"{network}, {way}" for network, way in product(networks.NETWORKS, _VECTORS)))  # fmt: skip
PUBLISHED = {"accuracy": 0.9483}  # POJ-104, 104 classes


@dataclass(frozen=True)
class ClassificationSpec:
    """How a folder is classified.

    Args:
        folds: parts that are predicted from the others.
        trees: of the forest behind the raw counts.
        cache: a folder that keeps compiled programs and predictions; an interrupted run goes on from there.
        dialect: how sources are compiled.
        fitting: train the networks, too.
        methods: only these of METHODS; all of them where there is none.
    """

    folds: int = 5
    seed: int = 0
    trees: int = TREES
    cache: Path | None = None
    dialect: ir.Dialect = ir.PLAIN
    fitting: networks.Fitting | None = None
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.folds < 2:
            raise BadInput(f"folds are 2 or more, got {self.folds}")
        for name in self.methods:
            if name not in METHODS:
                raise UnknownName("method of classification", name, METHODS)


def run(
    folder: str | Path, how: ClassificationSpec | None = None, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """Accuracy of every way with its interval, and a confusion matrix.

    Returns:
        classes, programs, skipped files with reasons, results, `twins`: the share of programs whose statements are
        those of a program in another fold, and `confusion` of METHOD: rows are true classes, columns predicted ones.

    Raises:
        BadInput: fewer than two classes, or a class with fewer programs than folds.
    """
    how, root = how or ClassificationSpec(), Path(folder)
    corpus, classes, labels = _labelled(root, how, progress)
    places = divided(labels, how.folds, how.seed)
    results, confusion = [], np.zeros((len(classes), len(classes)), dtype=np.int64)
    found = ways(corpus.graphs, how.seed, how.cache)
    _add_published(found, corpus)
    for method, predicted in _predictions(found, corpus, labels, places, how, progress):
        share = found.unknown.get(method.split(", ")[-1])
        results.append({"task": "classification", "platform": root.name, "method": method,
                        "folds": f"{how.folds} folds", **accuracy(predicted == labels, places),
                        "published": PUBLISHED, "unknown_share": share})  # fmt: skip
        if method == METHOD:
            np.add.at(confusion, (labels, predicted), 1)
    return {"classes": classes, "programs": len(labels), "skipped": [list(each) for each in corpus.skipped],
            "vocabulary": len(found.embedding.vocabulary), "twins": twins(found.rows, places), "results": results,
            "confusion": confusion.tolist()}  # fmt: skip


def _labelled(root: Path, how: ClassificationSpec, progress: Progress) -> tuple[Corpus, list[str], Labels]:
    if not root.is_dir():
        raise BadInput(f"{root} is no folder; give one that has a folder of programs for each class")
    files = [path for path in find_files([root]) if path.parent != root]
    if not files:
        raise BadInput(f"{root} has no folders with programs; the folders' names are the classes")
    corpus = read_all(files, how.cache, progress, how.dialect)
    names = [path.relative_to(root).parts[0] for path in corpus.paths]
    classes, counts = sorted(set(names)), Counter(names)
    if len(classes) < 2:
        raise BadInput(f"{root} has programs of {len(classes)} class; two or more are needed")
    rare = min(classes, key=counts.__getitem__)
    if counts[rare] < how.folds:
        raise BadInput(f"class {rare} has {counts[rare]} programs that can be read, and {how.folds} folds need as many")
    return corpus, classes, np.array([classes.index(name) for name in names])


def _add_published(found: Ways, corpus: Corpus) -> None:
    """The published embedding as a control, where its archive is at hand; it knows the statements of LLVM 5."""
    try:
        published = archives.published()
    except BadInput:
        return
    found.add_published([published.rows(graph.abstracted) for graph in corpus.graphs], published)


def _predictions(
    found: Ways, corpus: Corpus, labels: Labels, places: Labels, how: ClassificationSpec, progress: Progress
) -> Iterator[tuple[str, Labels]]:
    def kept(fitting: networks.Fitting | None) -> Memo:
        return Memo(how.cache, how.folds, how.seed, how.trees, fitting, places, labels, found.rows)

    def by_forest(features: Any) -> Labels:
        return cross_predict(dense(features), labels, places, lambda: forest(how.seed, how.trees))

    def by_line(features: Any) -> Labels:
        return cross_predict(scaled(features), labels, places, lambda: linear(how.seed))

    plain, fitted = kept(None), kept(how.fitting)
    made: dict[str, Callable[[], Labels]] = {}
    for way, features in found.features.items():
        name, predict = ("raw counts with a forest", by_forest) if way == "raw counts" else (way, by_line)
        made[name] = functools.partial(plain.recall, name, functools.partial(predict, features), ARRAY)
    if how.fitting is not None:
        edges = [graph.edges for graph in corpus.graphs]
        for network, (way, (rows, vectors)) in product(networks.NETWORKS, found.read.items()):
            programs, name = networks.ProgramSet(rows, edges, np.arange(len(labels))), f"{network}, {way}"
            given = (network, programs, labels, places, vectors, how.fitting, progress)
            predict_by = functools.partial(networks.cross_predict, *given)
            made[name] = functools.partial(fitted.recall, name, predict_by, ARRAY)
    for name, make in made.items():
        if not how.methods or name in how.methods:
            yield name, make()


def scaled(features: Any) -> Any:
    """Bags with rows of length 1; means with columns of mean 0 and deviation 1, divided by √columns."""
    from sklearn.preprocessing import StandardScaler, normalize

    if not isinstance(features, np.ndarray):
        return normalize(features)
    return StandardScaler().fit_transform(features) / np.sqrt(features.shape[1])


def twins(rows: Sequence[Any], places: Labels) -> float:
    """The share of programs whose statements, in their order, are also a program of another fold."""
    folds: dict[bytes, set[int]] = {}
    for row, place in zip(rows, places.tolist(), strict=True):
        folds.setdefault(row.tobytes(), set()).add(place)
    return float(np.mean([len(folds[row.tobytes()]) > 1 for row in rows]))


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
