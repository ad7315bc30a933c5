"""TO WHOM: collectives as data. Pure functions `(world_size, numel) -> Schedule`, any world size, any numel.

    >>> from laconic import schedules
    >>> print(schedules.validate(schedules.butterfly(4, 10)))
    butterfly all_reduce: 4 ranks, 10 values, 2 rounds, 8 messages, 80 values sent
    round   1  0⇄1  2⇄3   adds everything
    round   2  0⇄2  1⇄3   adds everything
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
