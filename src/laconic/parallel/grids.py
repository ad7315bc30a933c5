"""Dense layers on a grid of ranks: rank i·C + j is in row i and column j of R × C.

    summa    Y_ij = X_i W_jᵀ     rank (i, j) holds input block (i, j) and the weight's block (output j, input i); rows
                                 gather the input, columns the weight
    cannon   Y_ij = Σ_k X_ik W_jkᵀ, on a square grid: the same blocks; input blocks go round the rows and weight blocks
                                 round the columns, so that a rank never holds more than one of each
    1.5d     Y_ij = X_j W_iᵀ     outputs over the rows, the batch over the columns, weights alike in a row

Callers: the form `dense`. Between layers of a kind activations may stay as they lie ("grid").
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from laconic.errors import BadInput
from laconic.parallel.boundary import Boundary, Cut
from laconic.parallel.layer import Context, Layer, check_pieces, runs
from laconic.parallel.moves import Copy, Gather, Scatter, Shift, Spread, even


class GridLayer(Layer):
    """Base of the three: the grid, and whole values at both ends."""

    def __init__(self, name: str, context: Context, layer: nn.Module, takes: str, gives: str,
                 rows: int | None = None) -> None:  # fmt: skip
        super().__init__(name, context, layer, takes, gives)
        assert isinstance(layer, nn.Linear)
        ranks = self.size
        self.rows = rows or max(r for r in range(1, math.isqrt(ranks) + 1) if ranks % r == 0)
        if ranks % self.rows:
            raise BadInput(f"{name}: {ranks} ranks make no grid of {self.rows} rows")
        self.columns = ranks // self.rows
        self.i, self.j = divmod(self.cut.rank, self.columns)
        in_row = context.part_of([rank // self.columns for rank in range(ranks)])
        in_column = context.part_of([rank % self.columns for rank in range(ranks)])
        self.row, self.column = context.cut(name, in_row), context.cut(name, in_column)
        exact, weights = Boundary.of(None), f"{name} weights"  # no codec touches weights and their gradients
        self.row_weights = context.cut(weights, in_row, exact)
        self.column_weights = context.cut(weights, in_column, exact)
        self.inputs, self.outputs = layer.in_features, layer.out_features
        check_pieces(name, "inputs and outputs", min(self.inputs, self.outputs), max(self.rows, self.columns))
        self.keep(layer)

    def whole(self, x: Tensor) -> Tensor:
        """The input, whole."""
        if self.takes != "rows":
            return x
        return Gather(self.cut, 0, self.context.rows(own=x.shape[0]).sizes)(x)

    def given(self, y: Tensor) -> Tensor:
        """The output from whole, as the next layer takes it."""
        return y if self.gives != "rows" else Scatter(self.cut, 0, self.context.rows(whole=y.shape[0]).sizes)(y)

    def by_rank(self, pieces: list[Tensor], column: bool) -> list[Tensor]:
        """Pieces by a rank's place in its row or column, by rank."""
        return [pieces[rank % self.columns if column else rank // self.columns] for rank in range(self.size)]

    def keep(self, layer: nn.Linear) -> None:
        """Hold the weight's block (output j, input i), and the bias of output j."""
        outputs = self.by_rank(runs(even(self.outputs, self.columns)), column=True)
        inputs = self.by_rank(runs(even(self.inputs, self.rows)), column=False)
        self.hold("weight", layer.weight, {0: outputs, 1: inputs})
        self.hold("bias", layer.bias, {0: outputs})

    def _bias(self) -> Tensor | None:
        """The bias for the batch of this row: its gradient is the sum over the column."""
        return None if self.bias is None else Copy(self.column_weights)(self.weigh(self.bias))

    def _gathered(self, y: Tensor, batch: int) -> Tensor:
        if self.gives == "grid":
            return y
        y = Gather(self.row, -1, even(self.outputs, self.columns))(y)
        return self.given(Gather(self.column, 0, even(batch, self.rows))(y))


class Summa(GridLayer):
    """Rows gather inputs, columns gather weights."""

    def forward(self, x: Tensor) -> Tensor:
        if self.takes == "grid":
            batch, mine = x.shape[0] * self.rows, Spread(self.row, -1, even(self.inputs, self.columns))(x)
        else:
            x = self.whole(x)
            batch, mine = x.shape[0], Copy(self.row)(Scatter(self.column, 0, even(x.shape[0], self.rows))(x))
        weight = Spread(self.column_weights, 1, even(self.inputs, self.rows))(self.weigh(self.weight))
        return self._gathered(functional.linear(mine, weight, self._bias()), batch)


class Cannon(GridLayer):
    """Blocks go round the grid."""

    def keep(self, layer: nn.Linear) -> None:
        if self.rows != self.columns:
            raise BadInput(f"{self.cut.name}: Cannon's grid is square, {self.size} ranks are not; take split='summa'")
        super().keep(layer)

    def forward(self, x: Tensor) -> Tensor:
        batch, features = x.shape[0] * self.rows, even(self.inputs, self.columns)
        if self.takes != "grid":
            x = self.whole(x)
            batch = x.shape[0]
            x = Scatter(self.row, -1, features)(Scatter(self.column, 0, even(batch, self.rows))(x))
        weight, lead, out = self.weigh(self.weight), x.shape[:-1], self.weight.shape[0]
        # After the first turns, place p of a ring holds the features (own row or column + p).
        x = self._round(self.row, x, -self.i, [(*lead, size) for size in features])
        weight = self._round(self.column_weights, weight, -self.j, [(out, size) for size in features])
        turned = [[features[(first + place) % self.rows] for place in range(self.rows)] for first in (self.i, self.j)]
        total: Tensor | None = None
        for step in range(self.rows):
            y = functional.linear(x, weight)
            total = y if total is None else total + y
            if step + 1 < self.rows:
                x = self._round(self.row, x, -1, [(*lead, size) for size in turned[0]])
                weight = self._round(self.column_weights, weight, -1, [(out, size) for size in turned[1]])
                turned = [sizes[1:] + sizes[:1] for sizes in turned]
        assert total is not None
        bias = self._bias()
        return self._gathered(total if bias is None else total + bias, batch)

    @staticmethod
    def _round(cut: Cut, x: Tensor, by: int, shapes: list[tuple[int, ...]]) -> Tensor:
        return Shift(cut, by, shapes=shapes)(x) if by else x


class OneAndAHalf(GridLayer):
    """Outputs over the rows of the grid, the batch over its columns.

    Source: Gholami et al., Integrated Model, Batch, and Domain Parallelism in Training Neural Networks, SPAA 2018.
    """

    def keep(self, layer: nn.Linear) -> None:
        outputs = self.by_rank(runs(even(self.outputs, self.rows)), column=False)
        self.hold("weight", layer.weight, {0: outputs})
        self.hold("bias", layer.bias, {0: outputs})

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0] * self.columns
        if self.takes != "grid":
            x = self.whole(x)
            batch = x.shape[0]
            x = Scatter(self.row, 0, even(batch, self.columns))(x)
        weight = Copy(self.row_weights)(self.weigh(self.weight))
        bias = None if self.bias is None else Copy(self.row_weights)(self.weigh(self.bias))
        y = functional.linear(Copy(self.column)(x), weight, bias)
        y = Gather(self.column, -1, even(self.outputs, self.rows))(y)
        return y if self.gives == "grid" else self.given(Gather(self.row, 0, even(batch, self.columns))(y))

