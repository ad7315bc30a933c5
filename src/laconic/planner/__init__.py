"""Predict cost: work, depth, memory and energy of a model, and a plan of how to train it.

The entry points are `laconic.cost` and `laconic.plan`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
