"""Scripts that people have, trained as they are by DDP, `compress` and `distribute`: the same training everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from laconic.transports.launcher import run_local
from tests.scripts import frameworks, idioms
from tests.scripts.ways import WAYS, Run, train

EXACT = [way for way in WAYS if "none" in way]
NEEDS = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning"}
DISTRIBUTED = [way for way in WAYS if way.startswith("distribute")]


@pytest.mark.processes
@pytest.mark.parametrize(
    "script",
    [
        idioms.nanogpt, idioms.mingpt, idioms.imagenet, idioms.lstm, idioms.dcgan,
        frameworks.accelerate, frameworks.trainer, frameworks.lightning,
    ],
)  # fmt: skip
def test_a_script(script: Callable[[Run], None]) -> None:
    pytest.importorskip(NEEDS.get(script.__name__, "torch"))
    ranks = run_local(2, train, (script, tuple(WAYS)), timeout_s=100)
    for way in WAYS:
        check_replicas(way, [found[way] for found in ranks])
        for found in ranks:
            check_losses(way, found[way]["losses"], found["ddp"]["losses"])
            check_bytes(way, found[way], found["ddp"])


@pytest.mark.processes
def test_layers_that_are_unfrozen_or_added() -> None:
    ranks = run_local(2, train, (idioms.finetune, tuple(WAYS)), timeout_s=100)
    for way in WAYS:
        check_replicas(way, [found[way] for found in ranks])
        for found in ranks:
            losses, ddp = found[way]["losses"], found["ddp"]["losses"]
            if "dynamic8" in way:  # after whose 12th forward rank 1 gives up the new weights that it made itself
                losses, ddp = losses[:12] + losses[13:], ddp[:12] + ddp[13:]
            assert losses == pytest.approx(ddp, rel=1e-3 if way in EXACT else 0.25, abs=1e-4), way
            told = [text for text in found[way]["warnings"] if "wrap the model in DDP anew" in text]
            assert len(told) == (2 if way.startswith("compress") else 0)


def check_replicas(way: str, ranks: list[dict[str, Any]]) -> None:
    """All ranks end with the same weights, and where `finish` has been called with the same buffers."""
    assert len({found["weights"] for found in ranks}) == 1, way
    if way in DISTRIBUTED:
        assert len({found["buffers"] for found in ranks}) == 1, way


def check_losses(way: str, losses: list[float], ddp: list[float]) -> None:
    """DDP's, but for rounding; through an 8-bit codec within a few percent."""
    within = 1e-4 if way in EXACT or way == "ddp" else 0.05
    assert losses == pytest.approx(ddp, rel=within, abs=within), way


def check_bytes(way: str, found: dict[str, Any], ddp: dict[str, Any]) -> None:
    """DDP's gradients are not sent beside the job's, and the job says what it sends."""
    if way in EXACT:
        assert found["nbytes"] < 1.1 * ddp["nbytes"], way
    if "dynamic8" in way:
        assert found["nbytes"] < 0.6 * ddp["nbytes"], way
    for text in found["explained"]:
        assert re.match(r"this rank sends [\d,]+ B a step; DDP would send [\d,]+ B", text), text
