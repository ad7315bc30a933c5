"""Codecs that need a matrix and its factors, not a flat vector.

Callers: `exchange`, which owns their rounds (PowerSGD averages its factors between two half-steps; factors travel as
they are). They are registered and built by name as every codec, but say kind = "matrix" and refuse flat vectors.
Invariant: pure functions of their arguments; residuals and the previous Q live in `exchange`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.errors import BadInput


@dataclass(frozen=True)
class MatrixCodec(Codec):
    """Represents a c_out × c_in matrix by fewer floats; see `floats_sent`."""

    kind: ClassVar[str] = "matrix"

    @abstractmethod
    def floats_sent(self, shape: tuple[int, int]) -> int:
        """How many float32 one rank sends for a matrix of this shape."""

    def _refusal(self) -> BadInput:
        return BadInput(f"{self} takes matrices, not flat vectors; choose a quantiser or a selector for those")

    def max_nbytes(self, numel: int) -> int:
        raise self._refusal()

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        raise self._refusal()

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        raise self._refusal()

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        raise self._refusal()


def check_matrix(what: str, matrix: Tensor, rows: int | None = None, columns: int | None = None) -> None:
    """Raise BadInput unless `matrix` is 2-D float32 with the given sizes."""
    wanted = tuple("any" if size is None else size for size in (rows, columns))
    fits = matrix.dim() == 2 and all(w in ("any", size) for w, size in zip(wanted, matrix.shape, strict=True))
    if not fits or matrix.dtype != torch.float32:
        came = f"{tuple(matrix.shape)} of {matrix.dtype}"
        raise BadInput(f"{what} must be a float32 matrix of shape {wanted}, got {came}")
