"""What every way of a device's codecs is held against the processor's codec by: lengths, hard values, and checks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import laconic
from laconic.codecs.device.shell import BodyWay
from laconic.codecs.frame import seal
from laconic.codecs.selector import Sparse
from laconic.errors import NonFiniteError, PayloadError
from tests.codecs.subjects import same_bits, values


def ties(numel: int) -> Tensor:
    """Halves of linear8's steps, halves between dynamic8's levels, and equal magnitudes of both signs."""
    table = laconic.codec("dynamic8").table().levels[:128].astype(np.float64)
    halves = np.concatenate([[127.0], np.arange(-126.5, 127), 127 * (table[:-1] + table[1:]) / 2])
    return torch.from_numpy(np.resize(halves, numel).astype(np.float32))


def any_bits(numel: int) -> Tensor:
    """Finite floats of every exponent."""
    words = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(numel)).to(torch.int32)
    floats = words.view(torch.float32)
    return torch.where(floats.isfinite(), floats, torch.zeros(()))


def inputs(codec: laconic.codecs.Codec, first: bool) -> Iterator[tuple[str, Tensor]]:
    """Lengths around whole blocks, and values that are hard; for a codec's other specs, fewer of both."""
    unit = getattr(codec, "block", None) or getattr(codec, "bucket", None) or 4096
    for numel in sorted({0, 1, 7, unit, unit + 1} if first else {3}):
        yield f"normal {numel}", values("normal", numel, numel)
    yield "normal, two blocks and a ragged one", values("normal", 2 * unit + 37, unit)
    few = min(2 * unit + 5, 300)
    for kind in ("mixed", "denormal", "huge", "negative_zero", "zeros") if first else ():
        yield kind, values(kind, few, 1)
    if isinstance(codec, Sparse):  # more ties than are chosen, over blocks; fewer values than are to be chosen
        yield "steps", (values("normal", 2 * unit + 11, 3) * 2).round()
        yield "sparse", values("one_hot", unit + 9, 4)
    yield "ties", ties(few + 1)
    yield "any bits", any_bits(few + 2)


def check_encode(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    assert same_bits(kernel.encode(x, step=5), codec.encode(x, step=5)), "encode"


def check_slice(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    out = torch.full((codec.max_nbytes(x.numel()) + 9,), 7, dtype=torch.uint8)
    assert same_bits(kernel.encode(x, step=6, out=out[3:]), codec.encode(x, step=6)), "encode into a slice"
    assert out[:3].tolist() + out[-6:].tolist() == [7] * 9, "encode writes beside its slice"


def check_feedback(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    here = x.flip(0) * 0.1
    there = here.clone()
    try:
        expected = codec.encode_feedback(x, here, step=7)
    except NonFiniteError:
        return  # x + residual left float32
    assert same_bits(kernel.encode_feedback(x, there, step=7), expected), "encode_feedback"
    assert same_bits(there, here), "residual"


def check_selection(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    assert isinstance(codec, Sparse)
    here = x.flip(0) * 0.25
    there = here.clone()
    expected = codec.encode_selection(x, here, step=8)
    assert same_bits(kernel.encode_selection(x, there, step=8), expected), "encode_selection"
    assert same_bits(there, here), "what was not selected"


def check_forged(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    """A payload whose checksum is right and whose indices are not: found, here and there, and nothing is written."""
    assert isinstance(codec, Sparse)
    payload, out = codec.encode(x), torch.zeros(x.numel())
    payload[24] ^= 6
    payload[25:28] = 255
    seal(payload, codec.wire_name, x.numel(), payload.numel())
    refused(PayloadError, lambda: kernel.decode_add(payload, out))
    assert not out.any(), "a forged payload is added"
    kernel.read_payload(kernel.words_there(payload, x.numel()), out, True)
    refused(PayloadError, kernel.check)


def check_decode(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    numel = x.numel()
    payloads = [codec.encode(x), codec.encode(x.flip(0)), codec.encode(x * 0.5)]
    assert same_bits(kernel.decode(payloads[0], numel), codec.decode(payloads[0], numel)), "decode"
    here, there = x.flip(0), x.flip(0)
    codec.decode_add(payloads[0], here)
    kernel.decode_add(payloads[0], there)
    assert same_bits(there, here), "decode_add"


def check_mean(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    payloads = [codec.encode(x), codec.encode(x.flip(0)), codec.encode(x * 0.5)]
    here, there = x.flip(0), x.flip(0)
    for count, divisor in ((1, 2), (2, 2), (3, 3)):
        codec.decode_mean(payloads[:count], divisor, here)
        kernel.decode_mean(payloads[:count], divisor, there)
        assert same_bits(there, here), f"decode_mean of {count} by {divisor}"


def check_findings(codec: laconic.codecs.Codec, kernel: BodyWay, x: Tensor) -> None:
    """A payload on the device: sound ones pass, a flipped bit anywhere and foreign headers are found."""
    payload, numel = codec.encode(x), x.numel()
    kernel.words_there(payload, numel)
    kernel.check()
    for place in {0, 2, 5, 12, payload.numel() // 2, payload.numel() - 1}:
        damaged = payload.clone()
        damaged[place] ^= 4
        kernel.words_there(damaged, numel)
        refused(PayloadError, kernel.check)
    if not codec.fine and numel > 4:
        for bad in (float("nan"), float("inf"), -float("inf")):
            spoilt = x.clone()
            spoilt[numel * 3 // 4] = bad
            kernel.encode(spoilt)
            refused(NonFiniteError, kernel.check)
            kernel.encode_feedback(spoilt, torch.zeros(numel))
            refused(NonFiniteError, kernel.check)
    kernel.check()


def refused(error: type[Exception], call: Callable[[], None]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def compare(codec: laconic.codecs.Codec, way: BodyWay, *, first: bool) -> tuple[int, list[str]]:
    """How many cases there were, and what went wrong."""
    wrong, cases = [], 0
    for kind, x in inputs(codec, first):
        checks = [check_encode, check_feedback]
        checks += [check_decode] * (kind.startswith("normal"))
        checks += [check_slice, check_mean] * (kind in ("ties", "normal 0", "normal, two blocks and a ragged one"))
        checks += [check_findings] * (kind == "ties")
        if isinstance(codec, Sparse):
            checks += [check_selection] * (kind.startswith("normal")) + [check_forged] * (kind == "ties")
        for check in checks:
            cases += 1
            try:
                check(codec, way, x)
            except Exception:
                wrong.append(f"{check.__name__}, {kind}: {traceback.format_exc(limit=-3)}")
    return cases, wrong
