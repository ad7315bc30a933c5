"""Engines that run a schedule: torch.distributed, MPI, ZeroMQ, threads, and the LogGP simulator (see `base.py`)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
