"""Ends a rank whose launcher was killed: torchrun's agent then no longer ends its workers, and nobody waits for them.

Caller: `laconic.init`, where torchrun's agent holds the store. When the store is gone every later call on the world
raises; an orphan that makes none, as in asynchronous modes, gets the SIGTERM that its agent would have sent.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

import torch.distributed as dist

from laconic.errors import PeerLost
from laconic.transports.base import Transport
from laconic.transports.rendezvous import Place

LOOK_S = 1.0
_log = logging.getLogger("laconic.transports")


class LauncherWatch:
    """A thread that looks whether the store still answers."""

    def __init__(self, store: dist.Store, transport: Transport) -> None:
        self._store = store
        self._transport = transport
        self._parent = os.getppid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laconic-launcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking; a store that is frozen may keep the thread."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=LOOK_S)

    def _run(self) -> None:
        while not self._is_gone():
            if self._closed.wait(LOOK_S):
                return
        transport = self._transport
        text = f"{transport.where()}: the launcher was lost: the store it holds is gone"
        _log.error("%s", text)
        transport.break_off(PeerLost(text, rank=transport.rank))
        if not self._closed.wait(transport.timeout_s) and os.getppid() != self._parent:
            _log.error("[rank %d]: ending this process, whose launcher was killed", transport.rank)
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_gone(self) -> bool:
        try:
            self._store.check(["launcher"])
        except dist.DistNetworkError:
            return True
        except RuntimeError:  # slow, which is not to be gone
            return False
        return False


def watch_launcher(place: Place, transport: Transport) -> LauncherWatch | None:
    """Watch torchrun's agent; None where there is none, or where ranks end with their parent anyway."""
    agent = place.launcher == "torchrun" and place.store_host is None
    clone = getattr(place.store, "clone", None)
    if not agent or clone is None or multiprocessing.parent_process() is not None:
        return None
    return LauncherWatch(clone(), transport)
