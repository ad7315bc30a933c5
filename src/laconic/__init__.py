"""Laconic trains PyTorch models over networks slower than the model.

    import laconic
    world = laconic.init()                      # torchrun, mpiexec, or alone: same script
    laconic.all_reduce(tensor)                  # the cheapest algorithm for this link and size

Names are imported on first use, so that `import laconic` costs next to nothing.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the application configures logging

# The public names, once: type checkers read them here, and so does `_homes`.
if TYPE_CHECKING:
    from laconic import codecs as codecs
    from laconic import consistency as consistency
    from laconic import errors as errors
    from laconic import operators as operators
    from laconic import parallel as parallel
    from laconic import schedules as schedules
    from laconic import search as search
    from laconic import workloads as workloads
    from laconic.codecs import Codec as Codec
    from laconic.codecs import codec as codec
    from laconic.consistency.churn.options import Samples as Samples
    from laconic.consistency.distill import distill as distill
    from laconic.consistency.distribute import distribute as distribute
    from laconic.consistency.elastic import elastic as elastic
    from laconic.consistency.gossip.graphs import contraction as contraction
    from laconic.consistency.gossip.graphs import mixing_matrix as mixing_matrix
    from laconic.consistency.robust.rules import aggregate as aggregate
    from laconic.errors import LaconicError as LaconicError
    from laconic.exchange.checkpoints import Checkpoints as Checkpoints
    from laconic.exchange.checkpoints import Cursor as Cursor
    from laconic.exchange.collectives import all_gather as all_gather
    from laconic.exchange.collectives import all_reduce as all_reduce
    from laconic.exchange.collectives import all_to_all as all_to_all
    from laconic.exchange.collectives import barrier as barrier
    from laconic.exchange.collectives import broadcast as broadcast
    from laconic.exchange.collectives import reduce as reduce
    from laconic.exchange.collectives import reduce_scatter as reduce_scatter
    from laconic.exchange.ddp import hook as hook
    from laconic.exchange.dgc import DeepGradientCompression as DeepGradientCompression
    from laconic.exchange.hook import compress as compress
    from laconic.exchange.job import Job as Job
    from laconic.exchange.layout import Exemptions as Exemptions
    from laconic.exchange.options import Options as Options
    from laconic.exchange.options import sparsity_warm_up as sparsity_warm_up
    from laconic.exchange.residuals import merge_state_dicts as merge_state_dicts
    from laconic.exchange.shared_state import SharedState as SharedState
    from laconic.exchange.sparse import sparse_all_reduce as sparse_all_reduce
    from laconic.exchange.sparse_stream import SparseStream as SparseStream
    from laconic.exchange.state import CompressionState as CompressionState
    from laconic.operators.tuning import tune as tune
    from laconic.operators.tuning import untune as untune
    from laconic.parallel.divide import divide as divide
    from laconic.planner.cost import cost as cost
    from laconic.planner.plan import Asked as Asked
    from laconic.planner.plan import Plan as Plan
    from laconic.planner.plan import plan as plan
    from laconic.schedules.link import Link as Link
    from laconic.shrink.door import load_shrunk as load_shrunk
    from laconic.shrink.door import shrink as shrink
    from laconic.transports.faults import Faulty as Faulty
    from laconic.transports.launcher import run_local as run_local
    from laconic.transports.loggp import Network as Network
    from laconic.transports.loggp import Simulation as Simulation
    from laconic.transports.loggp import simulate as simulate
    from laconic.transports.probe import probe as probe
    from laconic.transports.profile import Profile as Profile
    from laconic.transports.threads import run_threads as run_threads
    from laconic.transports.world import World as World
    from laconic.transports.world import init as init
    from laconic.workloads.yellowfin import YellowFin as YellowFin


@functools.cache
def _homes() -> dict[str, str]:
    """The module of each public name: the block above, read from this file's source."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    lines = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: line.module or "" for line in lines for alias in line.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'laconic' has no attribute '{name}'")
    is_module = _homes()[name] == "laconic"
    module = importlib.import_module(f"laconic.{name}" if is_module else _homes()[name])
    # A package of that name comes first: calling `laconic.shrink` is calling the function.
    value = sys.modules.get(f"laconic.{name}") or getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*sorted(_homes()), "__version__"]
