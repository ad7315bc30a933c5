"""The pages whose examples are run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# tests/exchange/test_shared_state.py and test_recipes.py run these, where what they need is installed
ELSEWHERE = {"lightning_checkpoint.py", "hf_trainer.py", "accelerate_loop.py", "fsdp2.py", "torch_compile.py"}
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in ELSEWHERE)


def blocks(language: str) -> list[tuple[str, str]]:
    """Every block of a language: the name of its page, and what is in it."""
    fenced = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(str(page.relative_to(ROOT)), block) for page in PAGES for block in fenced.findall(page.read_text())]
