"""`python -m benchmarks code`: its own data, what it asks, what it times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.comprehension import code, poj, skipgram_speed
from laconic_code.embedding import UNKNOWN, Embedding
from laconic_code.ir import PLAIN
from tests.laconic_code.programs import KINDS, ir


def test_embeddings_of_our_own_are_asked_beside_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llvmlite")
    for n, kind in enumerate([*KINDS, *KINDS]):
        (tmp_path / f"{n}.ll").write_text(ir(kind, n, n + 1))
    names = ["<%ID> = add i32 <%ID>, <INT>", "<%ID> = add i32 <%ID>, <%ID>", "ret void", UNKNOWN]
    published = Embedding({name: n for n, name in enumerate(names)}, np.eye(4, dtype=np.float32))
    monkeypatch.setattr(code.poj, "unpack", lambda folder, per_class: (tmp_path, PLAIN))
    monkeypatch.setattr(code.device_mapping, "read_kernels", lambda task, tell, cache: ({}, 0))
    monkeypatch.setattr(code.archives, "published", lambda: published)
    with pytest.raises(SystemExit) as ended:
        main(["code", "--task", "analogies", "--json"])
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    found = {row["method"]: row for row in rows}
    assert found.keys() == {"published embedding", "embedding", "random embedding"}
    assert {row["task"] for row in rows} == {"analogies", "distances"}
    assert found["published embedding"]["vocabulary"] == 4
    assert found["published embedding"]["unknown_share"] > found["embedding"]["unknown_share"]


def test_the_speed_of_skip_gram_is_measured_beside_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipgram_speed, "REPEATS", 1)
    rows = {row["method"]: row["pairs_per_s"] for row in skipgram_speed.run(pairs=2_000, plain_pairs=128)}
    assert rows.keys() == {"Numba kernel", "plain torch loop"}
    assert min(rows.values()) > 0


def test_every_main_gets_its_type() -> None:
    for source in ("main()", "void main( )", " int main(int argc)", "void\nmain()"):
        assert poj.standard_main(f"int x;\n{source} {{ }}").split("\n")[1].startswith("int main(")
    assert poj.standard_main("int domain(int x);") == "int domain(int x);"
