"""Kernels compiled before a training: what ranks share, what the collector does, and one line in the log on rank 0."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from laconic.codecs import codec, compiling
from laconic.codecs.casts import Fp16

COMPILE_DECODING = compiling._compile_decoding.__wrapped__


class Timer:
    """Goes off at once if the machine is slow; remembers whether it was stopped."""

    is_slow = True
    made: list[Timer]
    compiled: list[tuple[str, str]]

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.seconds, self.function, self.calls = seconds, function, list[str]()
        Timer.made.append(self)

    def start(self) -> None:
        if self.is_slow:
            self.function()

    def cancel(self) -> None:
        self.calls.append("cancel")

    def join(self) -> None:
        self.calls.append("join")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    Timer.made, Timer.compiled = [], []
    monkeypatch.setattr(compiling, "threading", SimpleNamespace(Timer=Timer))
    for name in ("compile_kernels", "_compile_encoding", "_compile_decoding"):
        monkeypatch.setattr(compiling, name, lambda codec, name=name: Timer.compiled.append((name, str(codec))))
    compiling._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "laconic"):
        yield
    compiling._say_once.cache_clear()


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(compiling.dist, "get_rank", lambda: rank)


def test_neighbouring_ranks_begin_at_opposite_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for rank in (0, 1, 2):
        be_rank(rank, monkeypatch)
        Timer.compiled.clear()
        compiling.compile_planned([codec("topk(0.02)+qsgd(2)")])
        orders.append(list(Timer.compiled))
    parts = [
        ("compile_kernels", "topk(0.02)"), ("_compile_encoding", "qsgd(2)"), ("_compile_decoding", "qsgd(2)"),
        ("_compile_encoding", "none"), ("_compile_decoding", "none"),
    ]  # fmt: skip
    whole = [("compile_kernels", "topk(0.02)+qsgd(2)"), ("compile_kernels", "none")]
    assert orders == [parts + whole, parts[::-1] + whole, parts + whole]


def test_codecs_from_elsewhere_have_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp16, "__module__", "elsewhere")
    assert compiling._parts(Fp16()) == []


@pytest.mark.parametrize("spec", ["dynamic8", "fp16", "none", "qsgd(4)", "qsgd(4, bucket=none)"])
def test_decoding_is_compiled_on_zeros(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr(compiling, "_decode", lambda *call: decoded.append(call))
    COMPILE_DECODING(codec(spec))
    ((_, payload, numel),) = decoded
    assert codec(spec).decode(payload, numel).abs().max() <= torch.finfo(torch.float32).tiny


def test_the_collector_rests_while_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fail(codec: object) -> None:
        seen.append(gc.isenabled())
        raise OSError("full")

    monkeypatch.setattr(compiling, "compile_kernels", fail)
    with pytest.raises(OSError, match="full"):
        compiling.compile_planned([Fp16()])
    assert seen == [False]
    assert gc.isenabled()


def test_compiling_that_lasts_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        compiling.compile_planned([Fp16()])
    assert len(caplog.messages) == 1
    assert "kernels are being compiled" in caplog.text
    assert [timer.calls for timer in Timer.made] == [["cancel", "join"]] * 2


def test_kernels_from_the_cache_are_no_news(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timer, "is_slow", False)
    compiling.compile_planned([Fp16()])
    assert caplog.messages == []


def test_only_rank_0_says_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(1, monkeypatch)
    compiling.compile_planned([Fp16()])
    assert caplog.messages == []
