"""Exchange tensors through codec, schedule and transport: the collectives that users call, and `compress`.

`hook.py` has `compress`, `collectives.py` the collectives; the public names are in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
