"""Run a benchmark as a user types it, for tests."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `python -m benchmarks …` prints, which must end well."""
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert not ended.value.code
    return capsys.readouterr().out
