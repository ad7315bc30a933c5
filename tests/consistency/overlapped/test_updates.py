"""Steps of an optimiser bucket by bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laconic.consistency.late_updates import BucketSteps
from laconic.exchange.layout import flat

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, dampening=0.0),
    "adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
}


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def _groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.02}]


@pytest.mark.parametrize("name", MAKERS)
def test_the_parts_of_a_step_are_the_step_and_leave_the_groups_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = _made(), _made()
    plain, by_bucket = MAKERS[name](_groups(whole)), MAKERS[name](_groups(parts))
    parameters = list(parts.parameters())
    buffers = [flat(parameters[:1]), flat(parameters[1:])]  # the second has parameters of both groups
    steps, groups = BucketSteps(by_bucket, buffers), by_bucket.param_groups
    begins, seen = type(by_bucket)._init_group, list[bool]()  # type: ignore[attr-defined]

    def looks(*args: Any) -> Any:
        seen.append(by_bucket.param_groups is groups)
        by_bucket.zero_grad()  # as the loop's thread may, while another touches weights
        return begins(*args)

    for step in range(4):
        gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in whole.parameters()]
        for parameter, gradient in zip(whole.parameters(), copy.deepcopy(gradients), strict=True):
            parameter.grad = gradient
        plain.step()
        for view, gradient in zip((view for buffer in buffers for view in buffer.views), gradients, strict=True):
            view.copy_(gradient)
        steps.begin()
        with monkeypatch.context() as patch:
            patch.setattr(type(by_bucket), "_init_group", looks)
            for bucket in (1, 0):
                steps.apply(bucket)
        for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
            assert torch.equal(one, other)
    assert seen == [True] * 12, "in each step a part of one group and two of the others"
    assert by_bucket.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
