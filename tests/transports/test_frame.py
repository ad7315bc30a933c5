"""The one message frame: every message survives the wire, and whatever is cut, changed or strange is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.consistency.elastic import messages as members
from laconic.consistency.gossip.pairs import PairKind
from laconic.consistency.servers import messages as servers
from laconic.errors import BadInput, PayloadError
from laconic.transports.frame import (
    _KINDS,
    CHUNK_NBYTES,
    HEADER_NBYTES,
    INLINE_NBYTES,
    MAX_FRAME_NBYTES,
    MAX_TEXT_NBYTES,
    EngineKind,
    Frame,
    Growing,
    Header,
    MessageKind,
    dtype_code,
    family,
    unpack,
)
from tests.transports.frames import travelled

FAMILIES = [EngineKind, servers.ServerKind, members.MemberKind, PairKind]
KINDS = [kind for each in FAMILIES for kind in each]
WORDS = {32: st.integers(0, 2**32 - 1), 64: st.integers(0, 2**64 - 1), 8: st.integers(0, 255)}


@given(
    kind=st.sampled_from(KINDS),
    numbers=st.tuples(WORDS[64], WORDS[32], st.integers(-(2**63), 2**63 - 1), WORDS[64], WORDS[32], WORDS[8]),
    value=st.floats(allow_nan=False),
    text=st.text(max_size=50),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]),
    numel=st.integers(0, 3000),
)
@settings(max_examples=100, deadline=None)
def test_every_kind_survives_the_wire(
    kind: MessageKind, numbers: tuple[int, ...], value: float, text: str, dtype: torch.dtype, numel: int
) -> None:
    payload = torch.arange(numel).remainder(7).to(dtype)
    frame = Frame(Header(kind, *numbers, value=value), text, payload)
    again = travelled(frame)
    expected = frame.header._replace(dtype=dtype_code(dtype), nbytes=payload.nbytes)
    assert (again.header, again.kind, again.text, again.payload.dtype) == (expected, kind, text, dtype)
    assert torch.equal(again.payload, payload)


def test_numbers_are_those_of_one_family_each() -> None:
    assert len(_KINDS) >= len(KINDS) == len(set(KINDS))
    with pytest.raises(ValueError, match="has the number of"):

        @family
        class Again(MessageKind):
            HELLO = int(EngineKind.HELLO)


@pytest.mark.parametrize("kind", [next(iter(each)) for each in FAMILIES])
def test_what_is_cut_or_changed_is_refused(kind: MessageKind) -> None:
    frame = Header(kind, 1, 2, 3, 4, nbytes=8).pack("ring") + bytes(8)
    assert unpack(frame).payload.nbytes == 8
    for cut in range(HEADER_NBYTES + len("ring")):
        with pytest.raises(PayloadError):
            unpack(frame[:cut])
    for place in range(7):  # magic, version, kind, dtype
        with pytest.raises(PayloadError):
            unpack(frame[:place] + b"\xfe" + frame[place + 1 :])
    for place in (10, 11, 22, 23):  # impossible lengths
        with pytest.raises(PayloadError):
            unpack(frame[:place] + b"\xfe" + frame[place + 1 :])
    with pytest.raises(PayloadError, match="broken text"):
        unpack(frame.replace(b"ring", b"r\xffng"))


def test_long_payloads_come_in_chunks_that_ZeroMQ_takes() -> None:
    for nbytes in (INLINE_NBYTES, INLINE_NBYTES + 1, CHUNK_NBYTES, 2 * CHUNK_NBYTES + 8):
        frame = Frame(Header(EngineKind.PARCEL), "x" * MAX_TEXT_NBYTES, torch.arange(nbytes).to(torch.uint8))
        parts = list(frame.parts())
        assert len(parts) == max(1, -(-nbytes // CHUNK_NBYTES))
        assert all(len(part) <= MAX_FRAME_NBYTES for pair in parts for part in pair if part is not None)
        assert torch.equal(travelled(frame).payload, frame.payload)
        for head, piece in parts:
            assert unpack(head).header.chunk_nbytes == (nbytes if piece is None else len(piece))
    with pytest.raises(BadInput, match="a message's text has at most"):
        Header(EngineKind.PARCEL).pack("x" * (MAX_TEXT_NBYTES + 1))


def test_chunks_out_of_order_and_payloads_larger_than_memory_are_refused() -> None:
    frame = Frame(Header(EngineKind.PARCEL), payload=torch.zeros(3 * CHUNK_NBYTES, dtype=torch.uint8))
    chunks = [unpack(head)._replace(payload=memoryview(bytearray(piece or b""))) for head, piece in frame.parts()]
    growing = Growing()
    for wrong in (chunks[1], chunks[0]._replace(header=chunks[0].header._replace(dtype=4, nbytes=9))):
        with pytest.raises(PayloadError, match="does not continue"):
            growing.add(wrong)
    assert growing.add(chunks[0]) is None
    with pytest.raises(PayloadError, match="does not continue"):
        growing.add(chunks[2])
    with pytest.raises(PayloadError, match="does not continue"):
        growing.add(chunks[1])  # of a message that was given up
    assert [growing.add(chunk) is None for chunk in chunks] == [True, True, False]
    with pytest.raises(PayloadError, match="no room for a payload"):
        growing.add(chunks[0]._replace(header=Header(EngineKind.PARCEL, nbytes=1 << 47)))


def test_a_family_refuses_the_messages_of_another() -> None:
    for kind in KINDS:
        frame = Frame(Header(kind, flag=int(servers.ServerKind.PUSH) << 1))
        for module, own in ((servers, servers.ServerKind), (members, members.MemberKind)):
            read = (lambda f: members.unpack(1, f)) if module is members else servers.unpack
            if isinstance(kind, own):
                assert read(frame).kind is kind
            else:
                with pytest.raises(PayloadError, match="is no message"):
                    read(frame)
