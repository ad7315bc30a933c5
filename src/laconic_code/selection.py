"""A forest whose kind is chosen without a look at the rows that it predicts.

Caller: `device_mapping`. Every fold's training rows are divided again; the kind of forest with the best product of
accuracy and speed-up over these inner folds is trained on all of them. So no row takes part in the choice of what
predicts it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic_code.programs import Labels, Matrix

INNER = 3
INNER_TREES = 20
DIMS = 16  # principal components of programs: with the two auxiliary numbers among hundreds, forests rarely see them
KINDS = ("ExtraTreesClassifier", "RandomForestClassifier")


def reduced(features: Matrix, seed: int) -> Matrix:
    """The principal components of programs; labels take no part."""
    from sklearn.decomposition import PCA

    found: Matrix = PCA(min(DIMS, *features.shape), random_state=seed).fit_transform(features)
    return found


def cross_predict(features: Matrix, labels: Labels, worth: Matrix, folds: Labels, seed: int, trees: int) -> Labels:
    """What is predicted for each row by the chosen forest, which has seen only the other folds.

    Args:
        worth: the speed-up that each row has under each label.
    """
    found = np.empty_like(labels)
    for fold in np.unique(folds):
        train, test = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        scores = {kind: _score(kind, features, labels, worth, train, seed) for kind in KINDS}
        best = _forest(max(scores, key=scores.__getitem__), seed, trees)
        found[test] = best.fit(features[train], labels[train]).predict(features[test])
    return found


def _score(kind: str, form: Matrix, labels: Labels, worth: Matrix, train: Labels, seed: int) -> float:
    from sklearn.model_selection import StratifiedKFold

    predicted = np.empty_like(labels)
    for fit, check in StratifiedKFold(INNER, shuffle=True, random_state=seed).split(train, labels[train]):
        model = _forest(kind, seed, INNER_TREES).fit(form[train[fit]], labels[train[fit]])
        predicted[train[check]] = model.predict(form[train[check]])
    return float((predicted[train] == labels[train]).mean() * worth[train, predicted[train]].mean())


def _forest(kind: str, seed: int, trees: int) -> Any:
    from sklearn import ensemble

    return getattr(ensemble, kind)(trees, max_features=0.3, random_state=seed, n_jobs=1)
