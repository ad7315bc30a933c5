"""Sufficient factors: a fully connected layer sends what its weight gradient is the product of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import frame
from laconic.codecs.base import register
from laconic.codecs.matrix import MatrixCodec, check_matrix
from laconic.errors import BadInput, NonFiniteError, PayloadError


@register("factors")
@dataclass(frozen=True)
class Factors(MatrixCodec):
    """Sends (o, δ) of a layer y = o Wᵀ, from which every rank computes ∇W = δᵀ o.

    o (B × c_in) is the layer's input and δ (B × c_out) the gradient of its output, for a mini-batch of B. Exact, but
    the factors of different ranks cannot be added: each rank needs those of all others (all-gather).

    Cost: B·(c_in + c_out) floats and 32 bytes instead of c_in·c_out floats; the receiver does 2·B·c_in·c_out operations
    per rank. See `pays`.

    >>> codec = Factors()
    >>> o, delta = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    >>> gradient = torch.zeros(1, 2)
    >>> codec.unpack_add(codec.pack(o, delta), gradient)
    >>> gradient.tolist()
    [[3.0, 6.0]]

    Source: Chilimbi et al., Project Adam, OSDI 2014, §4; Xie et al., Distributed machine learning via sufficient factor
    broadcasting, UAI 2016; Zhang et al., Poseidon, USENIX ATC 2017.
    """

    unbiased: ClassVar[bool] = True
    source: ClassVar[str] = "Project Adam (Chilimbi et al. 2014); Xie et al. 2016; Poseidon (Zhang et al. 2017)"
    summary: ClassVar[str] = "a fully connected layer's (input, output gradient) instead of their product, exactly"

    def floats_sent(self, shape: tuple[int, int], batch: int = 1) -> int:
        """B·(c_out + c_in) for a weight of shape (c_out, c_in)."""
        return batch * (shape[0] + shape[1])

    def pays(self, batch: int, c_in: int, c_out: int, world_size: int) -> bool:
        """Whether a rank receives fewer floats than in an all-reduce of the gradient that sends the least.

        With P ranks, factors take (P − 1)·B·(c_in + c_out), by all-gather; the gradient 2·(P − 1)/P·c_in·c_out, by
        reduce-scatter and all-gather. At P = 1 nothing is sent either way, and the formula's limit is returned.

        >>> Factors().pays(32, 4096, 4096, 8), Factors().pays(512, 4096, 4096, 8)
        (True, False)
        """
        if min(batch, c_in, c_out, world_size) < 1:
            raise BadInput(
                f"factors: batch {batch}, c_in {c_in}, c_out {c_out} and world_size {world_size} must be at least 1"
            )
        return world_size * batch * (c_in + c_out) < 2 * c_in * c_out

    def pack(self, o: Tensor, delta: Tensor) -> Tensor:
        """The framed payload of (o, δ): B, c_in, c_out as uint32, padding, then o and δ as float32, row by row.

        Raises:
            BadInput: o and δ are not float32 matrices of one batch on the CPU.
            NonFiniteError: one holds NaN or infinity.
        """
        check_matrix("factors: o", o)
        check_matrix("factors: δ", delta, o.shape[0])
        if o.device.type != "cpu" or delta.device.type != "cpu":
            raise BadInput(f"factors: packs tensors on the CPU, got {o.device} and {delta.device}; use .cpu()")
        if not (bool(torch.isfinite(o).all()) and bool(torch.isfinite(delta).all())):
            raise NonFiniteError("factors: o or δ holds NaN or infinity")
        floats = o.numel() + delta.numel()
        buffer = torch.empty(frame.HEADER_NBYTES + _SIZES_NBYTES + 4 * floats, dtype=torch.uint8)
        body = buffer.numpy()[frame.HEADER_NBYTES :]
        sizes = np.array([o.shape[0], o.shape[1], delta.shape[1], 0], "<u4")
        body[:_SIZES_NBYTES] = sizes.view(np.uint8)
        values = body[_SIZES_NBYTES:].view(np.float32)
        values[: o.numel()] = o.detach().reshape(-1).numpy()
        values[o.numel() :] = delta.detach().reshape(-1).numpy()
        return frame.seal(buffer, self.name, floats, buffer.numel())

    def unpack(self, payload: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """(o, δ) for a weight of `shape` = (c_out, c_in).

        Raises:
            PayloadError: the payload is damaged or of another layer.
        """
        nbytes = payload.numel() - frame.HEADER_NBYTES - _SIZES_NBYTES if isinstance(payload, Tensor) else 0
        body = frame.unseal(payload, self.name, max(0, nbytes) // 4)
        if nbytes < 0 or nbytes % 4:
            raise PayloadError(f"factors: payload of {payload.numel()} bytes holds no whole matrices")
        batch, c_in, c_out, zero = (int(size) for size in body[:_SIZES_NBYTES].copy().view("<u4"))
        if (c_out, c_in) != tuple(shape) or zero or 4 * batch * (c_in + c_out) != nbytes:
            raise PayloadError(
                f"factors: payload of {nbytes} bytes is of a batch of {batch} for a weight of {(c_out, c_in)}, "
                f"{tuple(shape)} is expected"
            )
        values = torch.from_numpy(body[_SIZES_NBYTES:].copy().view(np.float32))
        return values[: batch * c_in].view(batch, c_in), values[batch * c_in :].view(batch, c_out)

    def unpack_add(self, payload: Tensor, gradient: Tensor) -> None:
        """gradient += δᵀ o, in one matrix product. On PayloadError `gradient` is untouched."""
        check_matrix("factors: the gradient", gradient)
        o, delta = self.unpack(payload, (gradient.shape[0], gradient.shape[1]))
        gradient.addmm_(delta.T, o)


_SIZES_NBYTES = 16
