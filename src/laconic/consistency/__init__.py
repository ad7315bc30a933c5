"""WHEN WORKERS AGREE: how the gradients or weights of several workers become one model.

`distribute(model, optimizer, consistency=…)` is the door. Each file of `modes/` is a mode, known as soon as it exists.

>>> from laconic.consistency import names
>>> "sync" in names()
True
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
