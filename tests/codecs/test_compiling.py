"""Kernels that take long to compile: one line in the log while it lasts, on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from laconic.codecs import compiling
from laconic.codecs.casts import Fp16


class Timer:
    """Goes off at once if the machine is slow; remembers whether it was stopped."""

    is_slow = True
    made: list[Timer]

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
    Timer.made = []
    monkeypatch.setattr(compiling, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(compiling, "compile_kernels", lambda codec: None)
    compiling._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "laconic"):
        yield
    compiling._say_once.cache_clear()


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
    monkeypatch.setattr(compiling.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(compiling.dist, "get_rank", lambda: 1)
    compiling.compile_planned([Fp16()])
    assert caplog.messages == []
