"""Karpathy's "tiny Shakespeare": 1,115,394 characters, 65 of them distinct; the last tenth is for testing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.workloads.data.catalogue import dataset
from laconic.workloads.data.collection import Collection, File
from laconic.workloads.data.split import Dataset, Split

TEXT = "input.txt"
TEST_FRACTION = 0.1
SHAKESPEARE = Collection(
    "tinyshakespeare",
    "Tiny Shakespeare",
    (
        File(
            TEXT,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
        ),
    ),
)


@dataset("shakespeare", SHAKESPEARE)
def shakespeare(contents: dict[str, bytes], source: str, length: int = 64) -> Dataset:
    """Windows of `length` characters and, for each character, the one that follows it.

    Args:
        contents: the text, by file name.
        source: where it was read.
        length: characters per window; a remainder shorter than a window is left out.
    """
    text = np.frombuffer(contents[TEXT], dtype=np.uint8)
    alphabet, tokens = np.unique(text, return_inverse=True)
    cut = len(tokens) - round(len(tokens) * TEST_FRACTION)
    if not 1 <= length < len(tokens) - cut:
        raise BadInput(f"a window has between 1 and {len(tokens) - cut - 1} characters, got {length}")
    title = f"Tiny Shakespeare ({len(alphabet)} characters)"
    train, test = (_windows(torch.from_numpy(part.astype(np.uint8)), length) for part in (tokens[:cut], tokens[cut:]))
    return Dataset("shakespeare", title, source, train, test)


def _windows(tokens: Tensor, length: int) -> Split:
    """Each window starts where the one before it ended; its targets are shifted by one character."""
    windows = tokens.unfold(0, length + 1, length)
    return Split(windows[:, :-1], windows[:, 1:])
