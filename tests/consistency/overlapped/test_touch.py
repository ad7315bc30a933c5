"""Every way to a module's parameters asks first, and copies of the module are plain."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from laconic.consistency.late_updates import AskingParameters, Touches
from laconic.consistency.modes.sync import StepSink

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda model: model(torch.ones(2, 3)),
    "attribute": lambda model: model[0].weight,
    "parameters": lambda model: next(model.parameters()),
    "named": lambda model: dict(model.named_parameters()),
    "state_dict": lambda model: model.state_dict(),
    "to": lambda model: model.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "get_parameter": lambda model: model.get_parameter("0.weight"),
    "functional": lambda model: functional_call(model, dict(model.named_parameters()), torch.ones(2, 3)),
    "apply": lambda model: model.apply(lambda each: [p.sum() for p in each.parameters(recurse=False)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_ask(way: str) -> None:
    model, asked = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), list[Tensor]()
    weight = model[0].weight
    touches = Touches(model, asked.append)
    WAYS[way](model)
    assert any(each is weight for each in asked)
    touches.close()
    asked.clear()
    model(torch.ones(2, 3, dtype=model[0].weight.dtype))
    assert not asked
    assert type(model[0]._parameters) is dict


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_ask_before_their_forward(kind: type[nn.RNNBase]) -> None:
    layer, asked = kind(3, 4), list[Tensor]()
    touches = Touches(layer, asked.append)
    layer(torch.ones(2, 1, 3))
    assert {id(p) for p in asked} == {id(p) for p in layer.parameters()}
    touches.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_do_not_ask(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(3, 4))
    lock = threading.Lock()  # cannot be copied, as the job that asks cannot
    touches = Touches(model, lambda _: lock.locked())
    other = copied(model)
    assert not any(isinstance(each._parameters, AskingParameters) for each in other.modules())
    assert torch.equal(other[0].weight, model[0].weight)
    touches.close()


def test_after_a_no_sync_inside_another_gradients_are_still_held() -> None:
    sink = StepSink.__new__(StepSink)
    sink._habits = SimpleNamespace(holding=False)  # type: ignore[assignment]
    with sink.no_sync():
        with sink.no_sync():
            pass
        assert sink._habits.holding
    assert not sink._habits.holding
