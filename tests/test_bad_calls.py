"""Calls that make no sense: each gets one sentence and a typed error, never one from inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.consistency.elastic.options import ElasticOptions
from laconic.errors import BadInput
from laconic.exchange import CompressionState, Exemptions
from laconic.planner import Asked
from laconic.shrinking.plan import Plan


def _distribute(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = nn.Linear(2, 2, dtype=dtype)
    return laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), **options)


def _decode(numel: Any) -> Callable[[Path], object]:
    codec = laconic.codec("dynamic8")
    return lambda folder: codec.decode(codec.encode(torch.ones(9)), numel)


CALLS: dict[str, tuple[Callable[[Path], object], str]] = {
    "numel of text": (_decode("a"), "numel must be a whole number from 0, got 'a'"),
    "half a value": (_decode(2.5), "got 2.5"),
    "a truth": (_decode(True), "got True"),
    "more than memory": (_decode(10**13), "no room for 10000000000000 values"),
    "root": (lambda folder: laconic.broadcast(torch.ones(2), root="a"), "root must be a rank"),
    "no folder": (lambda folder: laconic.Checkpoints(3), "named by a path, got 3"),
    "no model": (lambda folder: laconic.Checkpoints(folder).save(1, model=len), r"model must have a state_dict\(\)"),
    "no job": (lambda folder: laconic.SharedState(None), "got NoneType"),
    "no names": (lambda folder: CompressionState("none", nn.Linear(2, 2).parameters()), "named_parameters"),
    "no state": (lambda folder: _distribute().load_state_dict(3), "a mapping, got int"),
    "message_nbytes": (lambda folder: _distribute(message_nbytes=-1), "bytes from 0, got -1"),
    "overlap": (lambda folder: _distribute(overlap="x"), "overlap must be True, False or None, got 'x'"),
    "feedback": (lambda folder: _distribute(feedback="x"), "feedback must be"),
    "mode": (lambda folder: _distribute(consistency="sync(x)"), "drop_slowest is a whole number, got 'x'"),
    "world": (lambda folder: _distribute(world=3), r"what laconic\.init\(\) returns, got int"),
    "complex": (lambda folder: _distribute(torch.complex64), "parameter 'weight' is complex"),
    "exempt": (lambda folder: _distribute(exempt=3), "exempt is a list of names"),
    "samples of text": (lambda folder: laconic.Samples("90", batch=9), "dataset_size is a whole number, got '90'"),
    "half a worker": (lambda folder: ElasticOptions(workers=1.5), "elastic: workers is a whole number, got 1.5"),
    "no number": (lambda folder: ElasticOptions(silence_s=math.nan), "silence_s is a number, got nan"),
    "no patience": (lambda folder: ElasticOptions(patience_s=0), "patience_s > 0"),
    "algorithm": (lambda folder: ElasticOptions(algorithm=None), "algorithm is a word, got None"),
    "algorithm of a sum": (lambda folder: _distribute(algorithm=2), "unknown compressed all-reduce algorithm '2'"),
    "small": (lambda folder: Exemptions(smaller_than="1k"), "smaller_than is a whole number, got '1k'"),
    "ranks": (lambda folder: Asked(ranks="4"), "plan: ranks is a whole number, got '4'"),
    "memory": (lambda folder: Asked(4, memory_nbytes=1.5), "memory_nbytes is a whole number or None, got 1.5"),
    "link": (lambda folder: laconic.schedules.Link("50us", 1e-9), "link: latency_s is a number, got '50us'"),
    "rounds": (lambda folder: Plan(rounds="4"), "shrink: rounds is a whole number, got '4'"),
    "no rank": (lambda folder: laconic.transports.run_threads(0, lambda transport: 0), "1 rank or more"),
    "no work": (lambda folder: laconic.transports.run_threads(2, None), "a function of a transport"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_one_sentence(name: str, tmp_path: Path) -> None:
    call, says = CALLS[name]
    with pytest.raises(BadInput, match=says):
        call(tmp_path)
