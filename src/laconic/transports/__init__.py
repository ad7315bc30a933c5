"""Engines that run a schedule: torch.distributed, MPI, ZeroMQ, threads, and the LogGP simulator (see `base.py`)."""
