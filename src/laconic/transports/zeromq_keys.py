"""The job's key: it admits ranks to a ZeroMQ job, and encrypts its traffic.

Callers: launchers and `zeromq_gate.py`. All ranks of a job hold the same key. One given by the user also encrypts. On
loopback a job without one takes the user's own, which lies in a private file: other users are kept out, and nothing
gets slower.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from laconic.errors import BadInput
from laconic.storage.files import cache_folder

KEY_VARIABLE = "LACONIC_KEY"
_MIN_KEY_NBYTES = 16
_SIOCGIFADDR = 0x8915
_log = logging.getLogger("laconic.transports")


def new_key() -> bytes:
    """A fresh job key: 64 hexadecimal digits, 256 random bits; fit for LACONIC_KEY or a key file.

    >>> len(new_key())
    64
    """
    return secrets.token_hex(32).encode()


def read_key(path: str | Path | None = None) -> bytes | None:
    """The job's key from the file `path`, else from LACONIC_KEY, else None.

    Raises:
        BadInput: the file cannot be read or is readable by every user, or the key is shorter than 16 bytes.
    """
    if path is None:
        text = os.environ.get(KEY_VARIABLE)
        if text is None:
            return None
        return checked_key(text.strip().encode(), f"the key in {KEY_VARIABLE}")
    try:
        mode = os.stat(path).st_mode
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"the key file {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadInput(f"the key file {path} is open to every user of this machine; run: chmod 600 {path}")
    return checked_key(content.strip(), f"the key in {path}")


def loopback_key() -> bytes | None:
    """The key of this user on this machine, made when first asked for; None where there is no place to keep one.

    It lies in `laconic/loopback.key` in the user's cache folder, else in a private folder among the temporary ones.
    """
    for folder in _private_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _kept_key(folder / "loopback.key")
        except (OSError, BadInput) as error:
            _log.debug("no key of this user in %s: %s", folder, error)
    text = "no private folder for a key was found: whoever can read the job's store on this machine may join; set"
    warnings.warn(f"{text} {KEY_VARIABLE}", stacklevel=2)
    return None


def _private_folders() -> Iterator[Path]:
    yield cache_folder()
    yield Path(tempfile.gettempdir()) / f"laconic-{os.getuid()}"


def _kept_key(path: Path) -> bytes:
    """The key in `path`; the first caller writes it, atomically. OSError or BadInput if other users might know it."""
    if path.parent.lstat().st_uid != os.getuid():
        raise BadInput(f"{path.parent} is not this user's")
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(new_key() + b"\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise BadInput(f"{path} is not a file that only this user can read")
    return checked_key(path.read_bytes().strip(), f"the key in {path}")


def checked_key(key: bytes, what: str) -> bytes:
    if len(key) < _MIN_KEY_NBYTES:
        raise BadInput(f"{what} has {len(key)} bytes; a key needs at least {_MIN_KEY_NBYTES}")
    return key


def host_to_bind(bind: str) -> str:
    """The numeric address behind `bind`, or the interface it names.

    Raises:
        BadInput: an unknown host, or a wildcard, which other ranks could not connect to.
    """
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        if bind in {name for _, name in socket.if_nameindex()}:
            return bind
        try:
            return socket.gethostbyname(bind)
        except OSError:
            raise BadInput(f"cannot bind to '{bind}': neither an address, an interface nor a known host") from None
    if address.is_unspecified:
        raise BadInput(f"cannot advertise {bind}; bind to the address at which the other hosts reach this one")
    return bind


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: an address, `localhost` or the interface `lo`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("lo", "localhost")


def is_private(bind: str) -> bool:
    """Whether an address, a host or an interface has an address that only its own network reaches."""
    try:
        if bind not in {name for _, name in socket.if_nameindex()}:
            return ipaddress.ip_address(host_to_bind(bind)).is_private
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", bind.encode()[:15]))
        return ipaddress.ip_address(answer[20:24]).is_private
    except (OSError, BadInput):  # an interface without an address of IPv4
        return False
