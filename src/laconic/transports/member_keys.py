"""Key pairs of one's own for members of a job, and the list of who may come.

Callers: `elastic/line.py`, and `laconic key`. With the job's shared key whoever has it may come. With keys of their
own, members show that they hold a secret whose public half is on the job's list (CURVE), and who is taken off the list
is refused at once. An address then carries its owner's public key in place of a seal, so that whoever connects knows
whom it speaks to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from laconic.errors import BadInput
from laconic.transports.zeromq_address import Address
from laconic.transports.zeromq_keys import read_key

MEMBER_KEY_VARIABLE = "LACONIC_MEMBER_KEY"
SHARED = b"shared-"  # how a key for all begins in the file that `laconic key FILE` writes


def new_member_key() -> bytes:
    """A secret key, fit for a file; `public_key` gives its other half.

    >>> len(new_member_key()), len(public_key(new_member_key()))
    (64, 64)
    """
    return z85.decode(zmq.curve_keypair()[1]).hex().encode()


def public_key(secret: bytes) -> str:
    """The public half of a member's secret key, as 64 hexadecimal digits."""
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret.decode())))).hex()


def checked_public_key(text: str) -> str:
    """A public key as it stands in a job's list; BadInput for anything else."""
    if len(text) != 64 or any(digit not in "0123456789abcdef" for digit in text):
        raise BadInput(f"'{text[:80]}' is no public key: `laconic key show FILE` prints one, of 64 hexadecimal digits")
    return text


def read_member_key(path: str | Path | None = None) -> bytes | None:
    """The secret key in the file `path`, else in the one that LACONIC_MEMBER_KEY names, else None.

    Raises:
        BadInput: the file cannot be read, is readable by every user, or holds no such key.
    """
    named = path or os.environ.get(MEMBER_KEY_VARIABLE)
    if not named:
        return None
    secret = read_key(named) or b""
    try:
        checked_public_key(secret.decode())
    except (BadInput, UnicodeDecodeError):
        if secret.startswith(SHARED):
            text = "holds the key that all members share, which has no public half"
            raise BadInput(f"{named} {text}; make a member's own with `laconic key new FILE`") from None
        raise BadInput(f"{named} holds no member's key; make one with `laconic key new FILE`") from None
    return secret


@dataclass(frozen=True)
class MemberSecret:
    """A member's own credentials; as `Secret`, but each member has another.

    Args:
        key: its secret key.
        is_admitted: whether the owner of a public key is on the job's list; asked from several threads.
    """

    key: bytes
    is_admitted: Callable[[str], bool]

    def sealed(self, host: str, port: int) -> Address:
        """This member's address there."""
        return Address(host, port, bytes.fromhex(public_key(self.key)))

    def has_sealed(self, address: Address) -> bool:
        """Whether the owner of an address may take part."""
        return self.is_admitted(address.token.hex())

    def server(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket that binds demand a key of the list; a `Gate` answers for it."""
        sock.setsockopt(zmq.ZAP_DOMAIN, b"laconic")
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._secret())

    def client(self, sock: zmq.Socket[bytes], address: Address) -> None:
        """Make a socket that connects to `address` show this key, and believe nobody but the address's owner."""
        sock.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(address.token))
        sock.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._secret()))
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._secret())

    def admits(self, address: Address, mechanism: bytes, credentials: list[bytes]) -> bool:
        """Whether a peer with these credentials (see ZeroMQ's RFC 27) may speak to this member."""
        return mechanism == b"CURVE" and self.is_admitted(b"".join(credentials).hex())

    def _secret(self) -> bytes:
        return z85.encode(bytes.fromhex(self.key.decode()))
