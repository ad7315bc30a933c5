"""The recipes' files do what the page says, on two ranks, where what they need is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.prepared import PreparedPython

RECIPES = {
    "hf_trainer.py": (("transformers", "accelerate"), "resumed to the bit: True"),
    "accelerate_loop.py": (("accelerate",), "resumed to the bit: True"),
    "fsdp2.py": ((), "of the training set; sent"),
    "torch_compile.py": ((), "by distribute"),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run_on_two_ranks(name: str, tmp_path: Path, python: PreparedPython) -> None:
    needs, says = RECIPES[name]
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if name == "torch_compile.py" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler, and there is no g++")
    variables = {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    returned, said = python.run_ranks(ROOT / "examples" / name, tmp_path, **variables)
    assert returned == 0, said
    assert said.count(says) == 2, said
