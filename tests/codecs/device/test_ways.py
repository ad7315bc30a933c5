"""Which way a codec takes on a device: one sentence says why not a faster one."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

import laconic
from laconic.codecs.device import on_device, way, ways
from laconic.codecs.device.host import HostCodec

CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _chosen_anew():
    yield
    ways._choose.cache_clear()
    ways.no_kernels.cache_clear()


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_device_without_kernels_takes_the_host(kind: str) -> None:
    device = torch.device(kind, 0)
    assert way(laconic.codec("dynamic8"), device) == f"host: there are kernels for CUDA and ROCm, not for {kind}"
    assert isinstance(on_device(laconic.codec("dynamic8"), device), HostCodec)


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    said = "kernels need Triton, which is not installed; pip install 'laconic[gpu]'"
    assert way(laconic.codec("qsgd"), CUDA) == f"host: {said}"
    assert isinstance(on_device(laconic.codec("qsgd"), CUDA), HostCodec)
    assert way(laconic.codec("dynamic8"), CUDA) == f"torch operations: {said}"


def test_an_old_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.0")
    assert way(laconic.codec("qsgd"), CUDA) == "host: kernels need Triton 3.2 or newer, and 3.1.0 is installed"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("dynamic8", "kernel"),
        ("qsgd", "kernel"),
        ("onebit", "kernel"),
        ("bf16", "kernel"),
        ("dynamic8(100)", "torch operations: its kernels take blocks of a power of two from 16 to 16384"),
        ("onebit(none)", "host: its kernels take buckets of a power of two from 128 to 2048"),
        ("topk", "kernel"),
        ("topk+qsgd", "kernel"),
        ("topk(0.1, 50)", "host: its kernels take buckets of a power of two from 64 to 4096, or none"),
        ("topk+qsgd(bucket=40)", "host: its kernels take buckets of a power of two from 64 to 4096, or for trits none"),
        ("topk+natural", "host: natural has no kernel"),
        ("topk+qsgd+entropy", "host: entropy has no kernel"),
        ("natural", "torch operations: natural has no kernel"),
        ("linear8(stochastic=true)", "host: its kernels scale by blocks and round to the nearest"),
        ("powersgd", "torch operations"),
    ],
)
def test_what_a_device_with_triton_does(spec: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device that Triton knows would be answered; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert way(laconic.codec(spec), CUDA) == said


def test_an_old_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert way(laconic.codec("bf16"), CUDA) == "host: kernels need compute capability 8.0, and cuda:0 has 7.0"


def test_the_processor_takes_its_own_codec() -> None:
    codec = laconic.codec("dynamic8")
    assert on_device(codec, torch.device("cpu")) is codec
    assert way(codec, torch.device("cpu")) == "processor"
