"""Every share is handed out once, to whoever asks."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from laconic_lab.runs.unsynchronised import Shares


def _take_all(path: Path) -> list[int]:
    shares, taken = Shares(path, 500), []
    while (share := shares.take()) is not None:
        taken.append(share)
    shares.close()
    return taken


def test_every_share_goes_to_one_process(tmp_path: Path) -> None:
    path = tmp_path / "shares"
    with ProcessPoolExecutor(3) as pool:
        parts = list(pool.map(_take_all, [path] * 3))
    assert sorted(share for part in parts for share in part) == list(range(500))
    Shares(path, 500).remove()
    assert not path.exists()
