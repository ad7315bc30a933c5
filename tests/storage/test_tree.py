"""Trees of tensors: what goes in comes out to the bit, and what is cut off, flipped or forged is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from laconic.errors import BadInput, PayloadError
from laconic.storage.tree import MAGIC, check, dumps, loads, read_file, write_file


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    "tree",
    [
        {"step": 3, "none": None, "flag": True, "rate": 0.1, "text": "ü", "betas": (0.9, 0.999), "list": [1, [2]]},
        {0: torch.randn(3, 4), 7: {"empty": torch.empty(0, 5), "scalar": torch.tensor(1.5)}},
        [torch.tensor([float("nan"), -0.0, float("inf")]), torch.arange(5), torch.tensor([True, False])],
        {"half": torch.randn(7).half(), "bfloat16": torch.randn(7).bfloat16(), "bytes": torch.tensor([1, 255]).byte()},
        {"slice": torch.randn(4, 6)[:, ::2], "double": torch.randn(2, dtype=torch.float64)},
        {},
    ],
    ids=["plain", "numbers as keys", "special values", "small types", "not contiguous", "empty"],
)
def test_round_trip_to_the_bit(tree: object) -> None:
    assert _same(loads(dumps(tree)), tree)


def test_an_optimiser_goes_on_as_if_nothing_happened() -> None:
    def trained(steps: int, kept: bytes | None = None) -> nn.Linear:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        if kept is not None:
            state = loads(kept)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        saved[0] = dumps({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return model

    saved = [b""]
    trained(3)
    assert torch.equal(trained(4, saved[0]).weight, trained(7).weight)


def _nested(depth: int) -> list[object]:
    tree: list[object] = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    "unfit",
    [
        *({"what": object()}, {(1, 2): 3}, torch.zeros(2, dtype=torch.complex64)),
        *(torch.eye(2).to_sparse(), torch.empty(2, device="meta"), _nested(300), _nested(100_000)),
    ],
    ids=["object", "key", "complex", "sparse", "meta", "deep", "deeper than Python goes"],
)
def test_what_it_cannot_hold_is_refused(unfit: object) -> None:
    for refuses in (check, dumps):
        with pytest.raises(BadInput, match="saved state"):
            refuses(unfit)


def test_every_flipped_byte_and_every_cut_is_noticed() -> None:
    data = dumps({"step": 1, "weights": torch.arange(6.0)})
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(PayloadError):
            loads(bytes(flipped))
        with pytest.raises(PayloadError):
            loads(data[:place])


def _forged(head: bytes, tensors: bytes = b"", length: int | None = None) -> bytes:
    """A block with any head under a valid checksum."""
    body = (len(head) if length is None else length).to_bytes(8, "little") + head
    body += bytes(-len(body) % 8) + tensors
    return MAGIC + hashlib.sha256(body).digest() + body


def test_a_forged_block_with_nothing_wrong_is_read() -> None:
    values = torch.arange(3.0)
    found = loads(_forged(json.dumps([{"tensor": 0}, [["float32", [3]]]]).encode(), values.numpy().tobytes()))
    assert torch.equal(found, values)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"[1, 2, 3]",
        b"[" * 100_000,
        b'[{"list": ' * 50_000,
        b"[" + b"9" * 400 + b", []]",
        b"[" + b"9" * 5_000 + b", []]",
        b'["\xff", []]',
        b'[{"what": 1}, []]',
        b'[{"tensor": 0}, []]',
        b'[{"tensor": "a"}, [["float32", [1]]]]',
        b'[{"dict": [[[], 1]]}, []]',
        b'[0, [["float32", [4]]]]',
        b'[0, [["float32", [-1]]]]',
        b'[0, [["float32", [1.5]]]]',
        b'[0, [["float32", [true]]]]',
        b'[0, [["float32", 3]]]',
        b'[0, [["float32", [9223372036854775807, 9223372036854775807]]]]',
        b'[0, [["float32", [0, 9223372036854775807, 9223372036854775807]]]]',
        b'[0, [["float31", [1]]]]',
        b'[0, [["object", [1]]]]',
        b"[0, [7]]",
    ],
    ids=range(22),
)
def test_a_valid_checksum_does_not_make_it_believed(head: bytes) -> None:
    with pytest.raises(PayloadError):
        loads(_forged(head, bytes(12)))


@pytest.mark.parametrize("length", [1, 9, 1 << 40, (1 << 64) - 1])
def test_a_wrong_length_of_the_head_is_refused(length: int) -> None:
    with pytest.raises(PayloadError):
        loads(_forged(b"[0, []]", length=length))


def test_another_version_is_not_read() -> None:
    data = bytearray(dumps({}))
    data[len(MAGIC) - 1] += 1
    with pytest.raises(PayloadError, match="another version"):
        loads(data)


def test_large_numbers_come_back_and_those_beyond_reason_are_refused() -> None:
    kept = {"numpy's 128 bits": 1 << 127, "less": -(1 << 990)}
    assert loads(dumps(kept)) == kept
    with pytest.raises(BadInput, match="at most 996 bits"):
        dumps([1 << 997])


def test_tensors_lie_at_multiples_of_eight_and_a_file_names_itself(tmp_path: Path) -> None:
    data = bytes(dumps([torch.full((3,), 7, dtype=torch.uint8), torch.tensor([2.5])]))
    assert len(data) % 8 == 0
    assert data.index(b"\x07\x07\x07") % 8 == 0
    write_file(tmp_path / "kept", {"a": 1})
    assert read_file(tmp_path / "kept") == {"a": 1}
    with pytest.raises(PayloadError, match=r"nothing cannot be read: No such file"):
        read_file(tmp_path / "nothing")


def test_a_tensor_that_lies_on_several_ranks_is_refused_in_a_sentence() -> None:
    """As the weights of fully_shard do; torch's own error came when the file was half written."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(BadInput, match="cannot hold a DTensor, which lies on several ranks"):
            dumps({"weights": sharded})
    finally:
        dist.destroy_process_group()
