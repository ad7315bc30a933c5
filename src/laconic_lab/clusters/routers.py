"""Put a host behind a router that masquerades, as machines at homes are.

Caller: `cluster.py`. The router is the host that the others see. Behind it is a namespace with a private address, the
same behind every router. What leaves it carries the router's address, and nobody can dial in.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from laconic.errors import BadInput
from laconic.transports import namespace

ADDRESS = "192.168.7.2"  # of the machine behind a router
_GATEWAY = "192.168.7.1"
_INSIDE = "laconic0"  # the machine's interface: as that of every host
_OUTSIDE = "home0"


def connect(router: int, home: int, address: str, batch: Callable[[str, int, Sequence[str]], None]) -> None:
    """Connect the namespace `home` to the namespace `router`, which forwards and translates to `address`.

    Raises:
        BadInput: there is no iptables, or the kernel does not translate addresses.
    """
    if shutil.which("iptables") is None:
        raise BadInput("hosts behind routers need iptables (package iptables)")
    batch("ip", router, [
        f"link add {_OUTSIDE} type veth peer name {_INSIDE} netns {namespace.path_of(home)}",
        f"address add {_GATEWAY}/24 dev {_OUTSIDE}",
        f"link set {_OUTSIDE} addrgenmode none up",
    ])  # fmt: skip
    batch("ip", home, [
        "link set lo up",
        f"address add {ADDRESS}/24 dev {_INSIDE}",
        f"link set {_INSIDE} addrgenmode none up",
        f"route add default via {_GATEWAY}",
    ])  # fmt: skip
    namespace.inside(router, lambda: _translate(address))


def _translate(address: str) -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for each in ("all", "default"):
        Path(f"/proc/sys/net/ipv4/conf/{each}/rp_filter").write_text("0")
    words = ["iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-s", f"{_GATEWAY}/24", "!", "-o", _OUTSIDE]
    # By a fixed address, not MASQUERADE: a host with a delay sends by a device that has none.
    done = subprocess.run([*words, "-j", "SNAT", "--to-source", address], capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"this system does not translate addresses: {done.stderr.strip()}")
