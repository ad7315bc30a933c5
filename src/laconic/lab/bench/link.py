"""The job behind `laconic probe`: runs on every rank, returns the profile as JSON."""

from __future__ import annotations

import os

from laconic.transports.probe import probe
from laconic.transports.world import init


def measure(quick: bool) -> str:
    """Join the job, probe its link, and return the profile as JSON text."""
    os.environ.pop("LACONIC_LINK", None)  # a probe makes a profile and needs none
    with init() as world:
        return probe(world.transport, quick=quick).to_json()
