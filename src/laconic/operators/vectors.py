"""Loops over vector registers, in LLVM's own language: tiles of matrix products, and small matrices over long lines.

Callers: `products.py` and Winograd's kernels. Numba's compiler turns a loop into vectors by itself, but keeps no tile
of sums in registers, and guards every short loop by checks that cost more than the loop. So what is innermost is
written here, as functions that kernels call. Addresses count bytes, steps count values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from laconic.kernels import Array

_WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
ROWS = 14 if _WIDE else 6  # of a tile: with two vectors a row, 28 of 32 registers, or 12 of 16
VECTORS = 2
_INT, _SHORT = ir.IntType(64), ir.IntType(32)


def lanes(dtype: str) -> int:
    """Values in a vector register."""
    return (64 if _WIDE else 32) // np.dtype(dtype).itemsize


def padded(count: int, dtype: str) -> int:
    """`count` rounded up to whole vectors."""
    return -(-count // lanes(dtype)) * lanes(dtype)


def _of_integers(sizes: Sequence[int]) -> Any:
    return types.void(*(types.UniTuple(types.intp, n) for n in sizes))


def _flat(builder: ir.IRBuilder, values: Any) -> list[Any]:
    return [each for value in values for each in cgutils.unpack_tuple(builder, value)]


@cache
def tile_product(dtype: str) -> Any:
    """A function for kernels: c[i, j] = Σ_k a[i, k] · b[k, j] for i < rows and j < vectors · lanes.

    Its arguments are tuples of integers: a = (address, row, step), b = (address, step), c = (address, row) and
    size = (depth, rows, vectors, add): `row` leads from row to row, `step` from one k to the next. Rows of b and c lie
    in one piece. There are at most ROWS rows and VECTORS vectors; with `add` the product is added to what c holds.
    """

    @intrinsic
    def product(_: Any, a: Any, b: Any, c: Any, size: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Any) -> Any:
            *operands, rows, vectors, add = _flat(builder, values)
            done = builder.append_basic_block("done")
            added = builder.icmp_signed("!=", add, _INT(0))
            cases = builder.switch(builder.add(builder.mul(rows, _INT(VECTORS + 1)), vectors), done)
            for i in range(1, ROWS + 1):
                for j in range(1, VECTORS + 1):
                    block = builder.append_basic_block(f"tile{i}x{j}")
                    cases.add_case(_INT(i * (VECTORS + 1) + j), block)
                    builder.position_at_end(block)
                    _tile(_Writer(builder, dtype), i, j, operands, added)
                    builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return _of_integers((3, 2, 2, 4)), generate

    return product


def lines_product(matrix: Array, dtype: str) -> Any:
    """A function for kernels: y[i, n] = Σ_p matrix[i, p] · x[p, n] for n < vectors · lanes.

    Its arguments are tuples of integers: x = (address, row), y = (address, row) and (vectors,). The matrix is known
    when the code is written, so that its zeros cost nothing.
    """

    @intrinsic
    def product(_: Any, x: Any, y: Any, size: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Any) -> Any:
            x, x_row, y, y_row, vectors = _flat(builder, values)
            writer = _Writer(builder, dtype)

            def step(n: Any, _: list[Any]) -> list[Any]:
                at = builder.mul(n, _INT(writer.lanes))
                seen = [writer.load(writer.at(x, builder.add(at, builder.mul(x_row, _INT(p)))))
                        for p in range(matrix.shape[1])]  # fmt: skip
                for i, weights in enumerate(matrix):
                    place = writer.at(y, builder.add(at, builder.mul(y_row, _INT(i))))
                    writer.store(writer.combination(weights, seen), place)
                return []

            writer.loop(vectors, [], step)
            return context.get_dummy_value()

        return _of_integers((2, 2, 1)), generate

    return product


def _tile(writer: _Writer, rows: int, vectors: int, operands: list[Any], added: Any) -> None:
    """Code of a product of one size: start the sums, loop over the depth, store them."""
    a, a_row, a_step, b, b_step, c, c_row, depth = operands
    builder = writer.builder
    places = [(i, j) for i in range(rows) for j in range(vectors)]
    into = [writer.at(c, builder.add(builder.mul(c_row, _INT(i)), _INT(j * writer.lanes))) for i, j in places]

    def step(k: Any, sums: list[Any]) -> list[Any]:
        of_a, of_b = writer.at(a, builder.mul(k, a_step)), writer.at(b, builder.mul(k, b_step))
        line = [writer.load(builder.gep(of_b, [_INT(j * writer.lanes)])) for j in range(vectors)]
        column = [builder.load(builder.gep(of_a, [builder.mul(a_row, _INT(i))]), align=writer.size)
                  for i in range(rows)]  # fmt: skip
        spread = [writer.spread(value) for value in column]
        return [writer.fma(spread[i], line[j], total) for (i, j), total in zip(places, sums, strict=True)]

    start = [builder.select(added, writer.load(place), writer.zero) for place in into]
    for place, total in zip(into, writer.loop(depth, start, step), strict=True):
        writer.store(total, place)


class _Writer:
    """Writes instructions on vectors of one type."""

    def __init__(self, builder: ir.IRBuilder, dtype: str) -> None:
        self.builder, self.size, self.lanes = builder, np.dtype(dtype).itemsize, lanes(dtype)
        self.value = ir.FloatType() if self.size == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.value, self.lanes)
        self.zero = ir.Constant(self.vector, None)

    def at(self, address: Any, offset: Any) -> Any:
        """A pointer so many values behind an address."""
        return self.builder.gep(self.builder.inttoptr(address, self.value.as_pointer()), [offset])

    def load(self, pointer: Any) -> Any:
        return self.builder.load(self.builder.bitcast(pointer, self.vector.as_pointer()), align=self.size)

    def store(self, vector: Any, pointer: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(pointer, self.vector.as_pointer()), align=self.size)

    def spread(self, value: Any) -> Any:
        """A vector full of one value."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, _SHORT(0))
        return self.builder.shuffle_vector(first, undefined, ir.VectorType(_SHORT, self.lanes)(None))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a·b + c."""
        kind, name = self.vector, f"llvm.fma.v{self.lanes}f{8 * self.size}"
        function = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return self.builder.call(function, [a, b, c])

    def combination(self, weights: Array, vectors: list[Any]) -> Any:
        """Σ weight · vector, with the smaller weights first."""
        total = None
        for at in sorted(np.flatnonzero(weights), key=lambda at: float(abs(weights[at]))):
            weight = ir.Constant(self.vector, [float(weights[at])] * self.lanes)
            if total is None:
                total = vectors[at] if weights[at] == 1 else self.builder.fmul(weight, vectors[at])
            elif weights[at] == 1:
                total = self.builder.fadd(total, vectors[at])
            else:
                total = self.fma(weight, vectors[at], total)
        return self.zero if total is None else total

    def loop(self, count: Any, start: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """`step(n, values)` for n < count, 1 or more, on values that begin as `start`; returns the last ones."""
        builder = self.builder
        before, body, after = builder.block, builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(body)
        builder.position_at_end(body)
        n, values = builder.phi(_INT), [builder.phi(self.vector) for _ in start]
        found = step(n, values)
        following = builder.add(n, _INT(1))
        for phi, first, last in ((n, _INT(0), following), *zip(values, start, found, strict=True)):
            phi.add_incoming(first, before)
            phi.add_incoming(last, body)
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)
        return found
