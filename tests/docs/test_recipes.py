"""The recipes' files do what the page says, on two ranks, where what they need is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

RECIPES = {
    "hf_trainer.py": (("transformers", "accelerate"), "resumed to the bit: True"),
    "accelerate_loop.py": (("accelerate",), "resumed to the bit: True"),
    "fsdp2.py": ((), "of the training set; sent"),
    "torch_compile.py": ((), "by distribute"),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run_on_two_ranks(name: str, tmp_path: Path) -> None:
    needs, says = RECIPES[name]
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if name == "torch_compile.py" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler, and there is no g++")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **cache}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / name)], cwd=tmp_path, capture_output=True, text=True, timeout=110,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(says) == 2, done.stdout
