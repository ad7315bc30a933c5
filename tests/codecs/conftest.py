"""Makes `reference` (slow, obvious NumPy) and the helpers beside the codec tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def _restored_thread_count():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
