"""Predict what a division will send, before anything runs: layer → form → bytes per step.

Callers: users, the planner, benchmarks. The model is divided on the meta device, where tensors have shapes and no
values, in a world that counts bytes and sends none; forward and backward run there once. For stages, the shapes give
the values that cross. Fixed-size codecs make the prediction exact: a rank later counts the same number.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.parallel.boundary import Boundary, Silent, Spec, Traffic
from laconic.parallel.divide import CONTEXT, divide
from laconic.parallel.forms.stages import Stages
from laconic.parallel.layer import Layer
from laconic.parallel.pipeline import balance
from laconic.parallel.pipeline.cutting import Traced
from laconic.parallel.pipeline.forms import Outline
from laconic.parallel.pipeline.pipeline import split_batch
from laconic.parallel.pipeline.runner import sent_nbytes
from laconic.parallel.pipeline.tied import tied_nbytes, weights_of_several
from laconic.parallel.plan import Form, Plan
from laconic.text_table import aligned
from laconic.transports.world import World


@dataclass(frozen=True)
class PredictedRow:
    """A cut: its name, the form, how its input and output lie, and the bytes a rank sends in a step."""

    name: str
    form: str
    takes: str
    gives: str
    forward_nbytes: int
    backward_nbytes: int


@dataclass(frozen=True)
class DivisionPrediction:
    """The bytes that one rank sends in a step, by cut, in the model's order."""

    rows: tuple[PredictedRow, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.forward_nbytes + row.backward_nbytes for row in self.rows)

    def __str__(self) -> str:
        head = ("layer", "how", "takes", "gives", "forward B", "backward B")
        cells = [head, *((r.name, r.form, r.takes, r.gives, f"{r.forward_nbytes:,}", f"{r.backward_nbytes:,}")
                         for r in self.rows)]  # fmt: skip
        return "\n".join([*aligned(cells, left=range(4)), f"a rank sends {self.nbytes:,} bytes a step"])


def predict(
    model: nn.Module,
    plan: Plan | Form | Mapping[str, Form | str] | str,
    example: Tensor,
    ranks: int,
    *,
    codec: Spec | tuple[Spec, Spec] | Boundary | None = None,
    rank: int = 0,
) -> DivisionPrediction:
    """Predict what `rank` of `ranks` sends in a training step on a batch like `example`; leaves the model unchanged.

    Args:
        example: what this rank brings; only shape and dtype count.

    Raises:
        BadInput: as `divide`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(predict(model, "0=dense(output); 2=dense(input)", torch.ones(3, 4), ranks=2))
    layer  how           takes  gives  forward B  backward B
    0      dense         whole  part           0           0
    2      dense(input)  part   whole         24           0
    a rank sends 24 bytes a step
    """
    asked = Plan.of(plan)
    if not 0 <= rank < ranks:
        raise BadInput(f"rank is from 0 to {ranks - 1}, got {rank}")
    if isinstance(asked.alone, Stages):
        return _stages(model, asked.alone, Boundary.of(codec), example, (rank, ranks))
    whole = copy.deepcopy(model).to("meta")
    divided = divide(whole, asked, codec=codec, world=World(Silent(rank, ranks, 1.0)))
    given = example.detach().to("meta").requires_grad_(example.requires_grad)
    divided(given).sum().backward()
    traffic: Traffic = getattr(divided, CONTEXT).traffic
    forms = {name: str(form) for name, _, form in asked.layers(model)}
    layers = {layer.cut.name: layer for layer in divided.modules() if isinstance(layer, Layer)}
    order = {name: place for place, name in enumerate(dict(model.named_modules()))}
    names = dict.fromkeys([*layers, *(name for name, _ in traffic.sent_nbytes)])
    rows = []
    for name in sorted(names, key=lambda each: order.get(each.removesuffix(" weights"), len(order))):
        layer = layers.get(name)
        lies = ("", "") if layer is None else (layer.takes, layer.gives)
        sent = [traffic.sent_nbytes[name, way] for way in ("forward", "backward")]
        rows.append(PredictedRow(name, forms.get(name, "gradients"), *lies, *sent))
    return DivisionPrediction(tuple(rows))


def _stages(
    model: nn.Module, stages: Stages, boundary: Boundary, example: Tensor, place: tuple[int, int]
) -> DivisionPrediction:
    """A row for each value that crosses, and for each weight that several stages have."""
    rank, ranks = place
    traced = Traced.of(model, training=True)
    cuts = balance.choose(traced, ranks, boundary, None) if stages.cuts == "auto" else stages.cuts
    if len(cuts) != ranks - 1:
        raise BadInput(f"{len(cuts)} cuts make {len(cuts) + 1} stages, and there are {ranks} ranks")
    places = traced.positions(cuts)
    values, outline = traced.values(places), Outline(model, traced.graph)
    parts = split_batch([example], stages.micro, "batch", stages.uneven)
    forms = [outline.forms(part, [value.name for value in values]) for part in parts]
    rows = []
    for value in values:
        sent = [sent_nbytes(value, each[value.name], boundary, rank) for each in forms]
        users = ", ".join(map(str, value.targets))
        rows.append(
            PredictedRow(value.name, f"stage {value.source} → {users}", "", "", *map(sum, zip(*sent, strict=True)))
        )
    for name, weight, on in weights_of_several([traced.segment(places, stage).module for stage in range(ranks)]):
        rows.append(
            PredictedRow(name, f"tied: stages {', '.join(map(str, on))}", "", "", *tied_nbytes(weight, on, rank))
        )
    return DivisionPrediction(tuple(rows))
