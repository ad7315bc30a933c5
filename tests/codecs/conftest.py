"""Makes `reference` (slow, obvious NumPy) and the helpers beside the codec tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# The first example of a codec compiles its kernels, which takes seconds: no deadline per example. The same examples
# every run, so that a change and not the dice explains a new failure.
hypothesis.settings.register_profile("codecs", deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def _restored_thread_count():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
