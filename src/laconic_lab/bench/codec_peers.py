"""Codecs of other packages, timed on the same tensor by `codec_speed`.

torch is always there; bitsandbytes (`pip install 'laconic[bench]'`) and pi-quant (`pip install pypiquant`) are
measured if importable, else listed as absent. Each is called in its fastest way: preallocated where possible.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Operation = Callable[[], object]


@dataclass(frozen=True)
class CodecPeer:
    """A label, its operations by name in the order they are run, and facts for the record."""

    label: str
    operations: dict[str, Operation]
    about: dict[str, Any]


def find(x: Tensor, out: Tensor, threads: int) -> tuple[list[CodecPeer], list[dict[str, Any]]]:
    """The peers that run here, encoding x and decoding to `out`, and a record for each that does not.

    `threads` are for peers with threads of their own; torch's are set by the caller.
    """
    found: list[CodecPeer] = []
    absent: list[dict[str, Any]] = []
    for package, make in {"torch": _torch, "bitsandbytes": _bitsandbytes, "piquant": _piquant}.items():
        try:
            peers = make(x, out, threads)
            for peer in peers:
                for operation in peer.operations.values():
                    operation()
            found += peers
        except ImportError:
            absent.append({"peer": package, "installed": False})
        except Exception as error:  # a peer that is installed but does not run here is reported, not fatal
            told = f"{type(error).__name__}: {error}".partition("\n")[0]
            absent.append({"peer": package, "installed": True, "error": told})
    return found, absent


def _torch(x: Tensor, out: Tensor, threads: int) -> list[CodecPeer]:
    half = torch.zeros_like(x, dtype=torch.float16)
    cast: dict[str, Operation] = {
        "encode": lambda: half.copy_(x),
        "decode": lambda: out.copy_(half),
        "decode_add": lambda: out.add_(half),
    }
    return [CodecPeer("torch float16 copy_", cast, {"version": torch.__version__, "bits_per_element": 16.0})]


def _bitsandbytes(x: Tensor, out: Tensor, threads: int) -> list[CodecPeer]:
    package = importlib.import_module("bitsandbytes")
    functional = importlib.import_module("bitsandbytes.functional")
    held: dict[str, Any] = {}

    def encode() -> None:
        held["q"], held["state"] = functional.quantize_blockwise(x, blocksize=4096)

    operations: dict[str, Operation] = {
        "encode": encode,
        "decode": lambda: functional.dequantize_blockwise(held["q"], held["state"]),
    }
    note = "quantize_blockwise(blocksize=4096); allocates its results, as its CPU path takes no out="
    about = {"version": str(package.__version__), "bits_per_element": 8 + 32 / 4096, "note": note}
    return [CodecPeer("bitsandbytes", operations, about)]


def _piquant(x: Tensor, out: Tensor, threads: int) -> list[CodecPeer]:
    package = importlib.import_module("piquant")
    context = package.Context(threads)
    into = torch.zeros(x.numel(), dtype=torch.uint8)
    scale = 2 * float(x.abs().max()) / 255 or 1.0
    floats, bytes_ = package.DataType.F32, package.DataType.UINT8

    def encode(mode: Any) -> None:
        context.quantize_ptr(x.data_ptr(), floats, into.data_ptr(), bytes_, x.numel(), scale, 128, mode)

    def decode(operation: Any) -> None:
        context.dequantize_ptr(into.data_ptr(), bytes_, out.data_ptr(), floats, x.numel(), scale, 128, operation)

    about = {"version": str(package.__version__), "bits_per_element": 8.0, "note": "scale known beforehand"}
    nearest: dict[str, Operation] = {
        "encode": lambda: encode(package.RoundMode.NEAREST),
        "decode": lambda: decode(package.ReduceOp.SET),
        "decode_add": lambda: decode(package.ReduceOp.ADD),
    }
    stochastic: dict[str, Operation] = {"encode": lambda: encode(package.RoundMode.STOCHASTIC)}
    return [
        CodecPeer("piquant uint8 nearest", nearest, about),
        CodecPeer("piquant uint8 stochastic", stochastic, about),
    ]
