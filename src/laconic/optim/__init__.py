"""Optimisers for slow links: they run their own exchanges, through any codec and engine.

Each is a `torch.optim.Optimizer` for a plain model (no DDP): `laconic.optim.OneBitAdam(model.parameters())`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
