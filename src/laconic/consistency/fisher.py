"""A Fisher matrix seen row by row, kept as a low-rank part and a multiple of the identity, and its inverse.

Caller: `natural`. F ≈ U diag(λ) Uᵀ + ρI with r columns in U, so keeping and applying it costs r·D, not D².
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_ROWS = 256  # of one batch, that are looked at


class FisherFactor:
    """A running mean of xxᵀ over the rows x that come, F ← (1−η)F + η·mean(xxᵀ), cut to rank r after every batch.

    What the cut leaves out is spread over all directions, so that the trace is right.

    Args:
        dimension: D, the length of a row.
        rank: r.
        forget: η.
        smoothing: α: the inverse is that of F + α·tr(F)/D·I, between natural (0) and plain gradient (large).

    Source: Povey, Zhang and Khudanpur, Parallel Training of DNNs with Natural Gradient and Parameter Averaging, ICLR
    2015 workshop, section 4 and appendix B.
    Differs: the rank-r part is found from the batch's own Gram matrix each time, not by the paper's approximate update.
    """

    def __init__(self, dimension: int, rank: int, forget: float, smoothing: float) -> None:
        self.rank = min(rank, dimension)
        self.forget, self.smoothing = forget, smoothing
        self.u = torch.zeros(dimension, self.rank)
        self.scale = torch.zeros(self.rank)  # λ
        self.rest = 0.0  # ρ
        self.batches = 0

    def update(self, rows: Tensor) -> None:
        """Take in the rows (n, D) of one batch; what holds NaN or infinity is passed by."""
        rows = rows[:MOST_ROWS]
        if len(rows) == 0 or not bool(torch.isfinite(rows).all()):
            return
        new = self.forget if self.batches else 1.0
        stacked = torch.cat([((1 - new) * self.scale).sqrt()[:, None] * self.u.T, (new / len(rows)) ** 0.5 * rows])
        values, vectors = torch.linalg.eigh(stacked @ stacked.T)
        top = values[-self.rank :].clamp_min(0.0)
        self.rest = (1 - new) * self.rest + float((values.sum() - top.sum()).clamp_min(0.0)) / rows.shape[1]
        count = len(top)
        self.scale.zero_()
        self.u.zero_()
        self.scale[:count] = top
        self.u[:, :count] = stacked.T @ vectors[:, -self.rank :] / top.clamp_min(1e-30).sqrt()
        self.u[:, :count] *= (top > 1e-6 * top.max()).float()  # directions that were not seen
        self.scale[:count] *= (top > 1e-6 * top.max()).float()
        self.batches += 1

    def apply(self, rows: Tensor) -> Tensor:
        """rows·(F + α·tr(F)/D·I)⁻¹, times the identity's share of F, which the caller's scaling takes out."""
        dimension = self.u.shape[0]
        trace = float(self.scale.sum()) + self.rest * dimension
        ridge = self.rest + self.smoothing * trace / dimension
        if self.batches == 0 or ridge <= 0:
            return rows
        return rows - ((rows @ self.u) * (self.scale / (self.scale + ridge))) @ self.u.T

    def state_dict(self) -> dict[str, Tensor | float | int]:
        return {"u": self.u.clone(), "scale": self.scale.clone(), "rest": self.rest, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Tensor | float | int]) -> None:
        self.u = torch.as_tensor(state["u"]).clone()
        self.scale = torch.as_tensor(state["scale"]).clone()
        self.rest, self.batches = float(state["rest"]), int(state["batches"])
