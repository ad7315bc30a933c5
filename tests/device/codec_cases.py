"""What `test_codecs.py` runs on a fake device: codecs for its tensors, beside the processor's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.codecs import Codec
from laconic.codecs.device import on_device, way, ways
from laconic.errors import BadInput, NonFiniteError, PayloadError

DEVICE = torch.device("fakegpu:0")
SPECS = (
    "none", "bf16", "fp16", "dynamic8", "linear8(64)", "onebit", "qsgd", "ternary", "topk(0.1)", "topk+qsgd",
    "qsgd+entropy",
)  # fmt: skip
NUMELS = (0, 1, 5, 300, 9001)


def _pair(spec: str) -> tuple[Codec, Codec]:
    codec = laconic.codec(spec)
    return codec, on_device(codec, DEVICE)


def _values(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 3


def _same(there: Tensor, here: Tensor) -> None:
    a, b = there.cpu(), here
    assert a.dtype == b.dtype
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def payloads_and_residuals_are_the_processors(rank: int, controls: Any) -> None:
    for spec in SPECS:
        host, device = _pair(spec)
        for numel in NUMELS:
            x, residual = _values(numel), _values(numel, 1)
            here, there = residual.clone(), residual.to(DEVICE)
            expected = host.encode_feedback(x, here, step=3)
            sent = device.encode_feedback(x.to(DEVICE), there, step=3)
            assert sent.device.type == "cpu"
            _same(sent, expected)
            _same(there, here)
            _same(device.encode(x.to(DEVICE), step=4), host.encode(x, step=4))


def payloads_lie_where_the_caller_wants_them(rank: int, controls: Any) -> None:
    for spec in SPECS:
        host, device = _pair(spec)
        x = _values(5001)
        expected = host.encode(x)
        room = host.max_nbytes(x.numel()) + 3
        for place, first in (("cpu", 0), ("cpu", 3), (DEVICE, 0), (DEVICE, 3)):
            out = torch.zeros(room, dtype=torch.uint8, device=place)[first:]
            payload = device.encode(x.to(DEVICE), out=out)
            assert payload.device == torch.device(place)
            assert payload.data_ptr() == out.data_ptr()
            _same(payload, expected)


def values_come_back_from_host_and_device_payloads(rank: int, controls: Any) -> None:
    for spec in SPECS:
        host, device = _pair(spec)
        for numel in NUMELS:
            x, total = _values(numel), _values(numel, 2)
            payloads = [host.encode(_values(numel, seed)) for seed in range(3)]
            added, mean = total.clone(), torch.empty(numel)
            host.decode_add(payloads[0], added)
            host.decode_mean(payloads, 3, mean)
            for place in ("cpu", DEVICE):
                placed = [payload.to(place) for payload in payloads]
                out = torch.empty(numel, device=DEVICE)
                assert device.decode(placed[0], numel, out=out) is out
                _same(out, host.decode(payloads[0], numel))
                out = total.to(DEVICE)
                device.decode_add(placed[0], out)
                _same(out, added)
                device.decode_mean(placed, 3, out)
                _same(out, mean)
                for count in (1, 2):
                    host.decode_mean(payloads[:count], 2, mean_of_two := torch.empty(numel))
                    device.decode_mean(placed[:count], 2, out)
                    _same(out, mean_of_two)
            device.check()
            _same(device.decode(host.encode(x), numel), host.decode(host.encode(x), numel))


def a_payload_may_be_overwritten_once_it_is_decoded(rank: int, controls: Any) -> None:
    """The wire's memory is used again: nothing may read it after `decode_add` has returned."""
    for spec in SPECS:
        host, device = _pair(spec)
        x = _values(5001)
        payload = host.encode(x).pin_memory()
        out = torch.empty(x.numel(), device=DEVICE)
        controls.slow_fill(out, 1.0, 30)
        device.decode_add(payload, out)
        payload.zero_()
        _same(out, torch.ones(x.numel()) + host.decode(host.encode(x), x.numel()))


def values_are_read_when_their_stream_has_made_them(rank: int, controls: Any) -> None:
    for spec in SPECS:
        host, device = _pair(spec)
        with torch.Stream(device=DEVICE):
            x, residual = torch.zeros(3000, device=DEVICE), torch.zeros(3000, device=DEVICE)
            controls.slow_fill(x, 2.0, 30)
            sent = device.encode_feedback(x, residual)
            kept = residual.cpu()
        here = torch.zeros(3000)
        _same(sent, host.encode_feedback(torch.full((3000,), 2.0), here))
        _same(kept, here)


def nobody_waits_for_a_device_or_a_stream(rank: int, controls: Any) -> None:
    for spec in SPECS:
        _, device = _pair(spec)
        x, residual = _values(5001).to(DEVICE), torch.zeros(5001, device=DEVICE)
        out = torch.empty(device.max_nbytes(5001), dtype=torch.uint8, pin_memory=True)
        for _ in range(4):  # until there is enough pinned memory, even where no block of it is free again soon
            device.decode_add(device.encode_feedback(x, residual, out=out), x)
        torch.accelerator.synchronize()
        before = controls.counts()
        device.decode_add(device.encode_feedback(x, residual, out=out), x)
        after = controls.counts()
        for what in ("device_syncs", "stream_syncs", "pageable", "pinned"):
            assert after[what] == before[what], (spec, what)


def torch_operations_make_the_processors_bytes_where_values_are(rank: int, controls: Any) -> None:
    ways.SAME_BITS.add(DEVICE.type)
    ways._choose.cache_clear()
    try:
        for spec in ("natural", "flexpoint(8)", "dynamic8(100)"):
            host, device = _pair(spec)
            assert way(host, DEVICE).startswith("torch operations: "), way(host, DEVICE)
            x, here = _values(5001), _values(5001, 1)
            on_x, there = x.to(DEVICE), here.to(DEVICE)
            out = torch.empty(device.max_nbytes(5001), dtype=torch.uint8, pin_memory=True)
            for step in range(4):
                sent = device.encode_feedback(on_x, there, step=step, out=out)
                _same(sent, host.encode_feedback(x, here, step=step))
                _same(there, here)
                host.decode_add(sent, x)
                device.decode_add(sent, on_x)
                _same(on_x, x)
            torch.accelerator.synchronize()
            before = controls.counts()
            device.decode_add(device.encode_feedback(on_x, there, out=out), on_x)
            after = controls.counts()
            for what in ("device_syncs", "stream_syncs", "pageable", "pinned"):
                assert after[what] == before[what], (spec, what)
    finally:
        ways.SAME_BITS.remove(DEVICE.type)
        ways._choose.cache_clear()


def bad_input_is_refused_as_on_the_processor(rank: int, controls: Any) -> None:
    for spec in SPECS:
        host, device = _pair(spec)
        x = _values(5001)
        payload, total = host.encode(x), torch.ones(5001, device=DEVICE)
        damaged = payload.clone()
        damaged[40] ^= 1
        for bad in (damaged, payload[:-1], payload[:7], host.encode(x[1:])):
            with pytest.raises(PayloadError):
                device.decode_add(bad, total)
        _same(total, torch.ones(5001))
        with pytest.raises(BadInput, match="takes tensors on fakegpu:0"):
            device.encode(x)
        with pytest.raises(BadInput, match="residual"):
            device.encode_feedback(x.to(DEVICE), torch.zeros(3, device=DEVICE))
        with pytest.raises(BadInput, match="max_nbytes"):
            device.encode(x.to(DEVICE), out=torch.empty(3, dtype=torch.uint8))
        if not host.fine:
            x[4500] = float("nan")
            with pytest.raises(NonFiniteError) as here:
                host.encode_feedback(x, torch.zeros(5001))
            with pytest.raises(NonFiniteError) as there:
                device.encode_feedback(x.to(DEVICE), torch.zeros(5001, device=DEVICE))
            assert str(there.value) == str(here.value)


def what_they_say_of_themselves_is_the_processors(rank: int, controls: Any) -> None:
    for spec in SPECS:
        host, device = _pair(spec)
        assert str(device) == str(host)
        for attribute in ("name", "kind", "fixed_size", "unbiased", "stochastic", "coarse", "exact", "fine"):
            assert getattr(device, attribute) == getattr(host, attribute)
        assert on_device(laconic.codec(spec), torch.device("fakegpu")) is device
        assert way(host, DEVICE).split(":")[0] in ("torch operations", "host")
