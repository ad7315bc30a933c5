"""Frames for tests, and what becomes of them on the wire."""

from __future__ import annotations

from torch import Tensor

from laconic.transports.frame import EngineKind, Frame, Growing, Header, dtype_code, unpack


def parcel(payload: Tensor, tag: int = 0) -> Frame:
    """A tensor by itself."""
    return Frame(Header(EngineKind.PARCEL, code=tag), payload=payload)


def travelled(frame: Frame) -> Frame:
    """What a receiver gets of a frame: packed, taken apart, checked and put together as the engine does."""
    frame = frame._replace(header=frame.header._replace(dtype=dtype_code(frame.payload.dtype)))
    growing, whole = Growing(), None
    for head, piece in frame.parts():
        arrival = unpack(head)
        whole = growing.add(arrival if piece is None else arrival._replace(payload=memoryview(bytearray(piece))))
    assert whole is not None
    return whole
