"""What `make demo` compares, and on what: a small network on real digits, by four configurations and three seeds."""

from __future__ import annotations

from laconic.errors import BadInput
from laconic.lab.clusters.cluster import Cluster

WORKLOAD = "digits-mlp"
CONFIGS = ("ddp", "compress:dynamic8", "distribute:dynamic8", "compress:topk(0.01)+qsgd(4)")
LINK = "100mbit"
EPOCHS = 10  # half the workload's own: enough for the target on most seeds, and done in about two minutes
SEEDS = 3


def find_link(workers: int) -> tuple[str | None, str]:
    """The link to compare on, and a sentence that says which and why."""
    try:
        with Cluster(workers, LINK):
            return LINK, f"{workers} emulated hosts, joined by links of 100 Mbit/s"
    except BadInput as error:
        why = str(error).partition(";")[0]
        return None, f"{workers} processes on this machine's loopback, which is quicker than any network: {why}"
