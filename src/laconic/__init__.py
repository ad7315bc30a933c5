"""Laconic trains PyTorch models over networks slower than the model.

    import laconic
    world = laconic.init()                      # torchrun, mpiexec, or alone: same script
    laconic.all_reduce(tensor)                  # the cheapest algorithm for this link and size

Names are imported on first use, so that `import laconic` costs next to nothing.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the application configures logging

if TYPE_CHECKING:
    from laconic import codecs, errors, schedules
    from laconic.codecs import Codec, codec
    from laconic.consistency.churn.job import elastic
    from laconic.consistency.distribute import distribute
    from laconic.errors import LaconicError
    from laconic.exchange.checkpoints import Checkpoints
    from laconic.exchange.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        reduce,
        reduce_scatter,
    )
    from laconic.exchange.cursor import Cursor
    from laconic.exchange.dgc import DeepGradientCompression
    from laconic.exchange.explain import explain
    from laconic.exchange.hook import compress, hook
    from laconic.exchange.state import CompressionState
    from laconic.exchange.warm_up import sparsity_warm_up
    from laconic.schedules.link import Link
    from laconic.transports.loggp import Network, Simulation, simulate
    from laconic.transports.probe import probe
    from laconic.transports.profile import Profile
    from laconic.transports.world import World, init

_HOME = {
    "Checkpoints": "exchange.checkpoints",
    "Codec": "codecs",
    "CompressionState": "exchange.state",
    "Cursor": "exchange.cursor",
    "DeepGradientCompression": "exchange.dgc",
    "LaconicError": "errors",
    "Link": "schedules.link",
    "Network": "transports.loggp",
    "Profile": "transports.profile",
    "Simulation": "transports.loggp",
    "World": "transports.world",
    "all_gather": "exchange.collectives",
    "all_reduce": "exchange.collectives",
    "all_to_all": "exchange.collectives",
    "barrier": "exchange.collectives",
    "broadcast": "exchange.collectives",
    "codec": "codecs",
    "codecs": "",
    "compress": "exchange.hook",
    "distribute": "consistency.distribute",
    "elastic": "consistency.churn.job",
    "errors": "",
    "explain": "exchange.explain",
    "hook": "exchange.hook",
    "init": "transports.world",
    "probe": "transports.probe",
    "reduce": "exchange.collectives",
    "reduce_scatter": "exchange.collectives",
    "schedules": "",
    "simulate": "transports.loggp",
    "sparsity_warm_up": "exchange.warm_up",
}

__all__ = [
    "Checkpoints",
    "Codec",
    "CompressionState",
    "Cursor",
    "DeepGradientCompression",
    "LaconicError",
    "Link",
    "Network",
    "Profile",
    "Simulation",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "codec",
    "codecs",
    "compress",
    "distribute",
    "elastic",
    "errors",
    "explain",
    "hook",
    "init",
    "probe",
    "reduce",
    "reduce_scatter",
    "schedules",
    "simulate",
    "sparsity_warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'laconic' has no attribute '{name}'")
    home = _HOME[name]
    module = importlib.import_module(f"laconic.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
