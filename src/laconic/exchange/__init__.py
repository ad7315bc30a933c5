"""Where codec, schedule and transport meet: the collectives a user calls, and `compress`.

`hook.py` is the door, `collectives.py` what is called by itself; the names are in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
