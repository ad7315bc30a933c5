"""Bandwidth × delay, the kernel's limits, and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.schedules.link import Link
from laconic.transports.tcp_window import TcpLimits, advice, needed_nbytes

DEFAULTS = TcpLimits(6 << 20, 4 << 20)  # Linux


@pytest.mark.parametrize(("link", "fits"), [("100mbit,40ms", True), ("1gbit,5ms", True), ("1gbit,40ms", False)])
def test_a_connection_with_usual_buffers_fills_short_or_slow_links_only(link: str, fits: bool) -> None:
    given = Link.parse(link)
    assert (advice(given, DEFAULTS) == []) == fits == (needed_nbytes(given) <= DEFAULTS.window_nbytes)


def test_with_what_is_advised_it_does() -> None:
    link = Link.parse("1gbit,40ms")
    lines = advice(link, DEFAULTS)
    receive, send = (int(line.strip("'").split()[-1]) for line in lines)
    assert advice(link, TcpLimits(receive, send)) == []
    assert TcpLimits(receive, send).window_nbytes == needed_nbytes(link)


def test_limits_are_read_from_the_kernel_or_unknown(tmp_path: Path) -> None:
    assert TcpLimits.read(tmp_path) is None
    (tmp_path / "tcp_rmem").write_text("4096\t131072\t6291456\n")
    (tmp_path / "tcp_wmem").write_text("4096\n")
    assert TcpLimits.read(tmp_path) is None
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t4194304\n")
    assert TcpLimits.read(tmp_path) == DEFAULTS
