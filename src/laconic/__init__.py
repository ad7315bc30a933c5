"""Laconic cuts communication time in PyTorch training by compressing and overlapping gradients.

    import laconic
    world = laconic.init()                      # torchrun, mpiexec, or alone: same script
    laconic.all_reduce(tensor)                  # the cheapest algorithm for this link and size

The names below are what most programs need; the rest is in the packages, as `laconic.exchange.Options`. Both are listed
in `__init__.pyi` and imported on first use, so that `import laconic` costs next to nothing.
"""

import logging

import lazy_loader

__version__ = "0.1.0"
__all__ = [
    "Checkpoints", "Job", "Samples", "SharedState", "World", "all_gather", "all_reduce", "all_to_all", "barrier",
    "broadcast", "codec", "compress", "cost", "distribute", "divide", "elastic", "errors", "init", "load_shrunk",
    "plan", "reduce", "reduce_scatter", "search", "shrink", "tune",
]  # fmt: skip

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the application configures logging
__getattr__, __dir__, _ = lazy_loader.attach_stub(__name__, __file__)
