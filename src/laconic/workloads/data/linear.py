"""Synthetic data for linear regression: y = ⟨x, w⟩ + noise, with a known best error to judge convergence by.

The variances of x's coordinates fall as 1/√j, so that some matter more than others, as a selector such as top-k
assumes, and a thousand of them still converge in seconds.
"""

from __future__ import annotations

import numpy as np
import torch

from laconic.errors import BadInput
from laconic.workloads.data.catalogue import dataset
from laconic.workloads.data.split import Dataset, Split

NOISE = 0.1  # standard deviation: no model has a mean squared error below NOISE² on test data, on average


@dataset("linear")
def linear(features: int = 1000, train_samples: int = 8192, test_samples: int = 2048, seed: int = 0) -> Dataset:
    """Normal features with decaying scales, weights w ~ N(0, 1), noise of standard deviation 0.1.

    Args:
        features: length of x.
        train_samples: of the training split.
        test_samples: of the test split.
        seed: of the data, not of the run: every run sees the same problem.
    """
    if min(features, train_samples, test_samples) < 1:
        sizes = f"{features}, {train_samples} and {test_samples}"
        raise BadInput(f"linear data need features, train_samples and test_samples of at least 1, got {sizes}")
    random = np.random.default_rng([0x11EA, seed])
    weights = random.standard_normal(features)
    scales = np.arange(1, features + 1) ** -0.25
    x = random.standard_normal((train_samples + test_samples, features)) * scales
    y = x @ weights + NOISE * random.standard_normal(len(x))
    inputs, targets = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))
    train = Split(inputs[:train_samples], targets[:train_samples])
    test = Split(inputs[train_samples:], targets[train_samples:])
    return Dataset("linear", f"made linear data ({features:,} features)", f"made with seed {seed}", train, test)
