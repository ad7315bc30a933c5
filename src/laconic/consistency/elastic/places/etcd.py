"""A meeting place in an etcd cluster: `etcd://host:2379/job`, with TLS `etcds://…`.

Several members are named with commas (`etcd://a:2379,b:2379/job`); one that is away is skipped. A user and a password
stand before the hosts (`etcd://user:password@a:2379/job`). Files for TLS are named by LACONIC_ETCD_CA, and for a
client's own certificate by LACONIC_ETCD_CERT and LACONIC_ETCD_KEY.

`create` is a transaction that puts a key only if it does not exist. Each appended line is a key of its own. The client
would write text in Latin-1, so it gets bytes.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from laconic.consistency.elastic.places.base import PLACES, Turns, split_address, split_port
from laconic.errors import BadInput, StorageError

EXAMPLE = "etcd://host:2379/job"
ANSWER_S = 3.0  # of one member; the next is asked then
T = TypeVar("T")


@PLACES.register("etcd")
class EtcdPlace:
    """The keys below `laconic/JOB/` of an etcd cluster."""

    is_quick: ClassVar[bool] = False
    _tls: ClassVar[bool] = False

    def __init__(self, where: str) -> None:
        servers, job = split_address(where, EXAMPLE)
        login, _, servers = servers.rpartition("@")
        self._user, _, self._password = login.partition(":")
        self.where = where.replace(f":{self._password}@", "@") if self._password else where
        self._prefix = f"laconic/{job}/"
        self._members = [self._member(*split_port(each, 2379, self.where)) for each in servers.split(",")]
        self._lock = Turns()  # a session of HTTP is one thread's at a time

    def _member(self, host: str, port: int) -> Any:
        try:
            from etcd3gw.client import Etcd3Client
        except ImportError as error:
            raise BadInput(f"to meet at {self.where} install the extra: pip install 'laconic[etcd]'") from error
        shown = f"[{host}]" if ":" in host else host
        if not self._tls:
            return Etcd3Client(shown, port, timeout=ANSWER_S)
        authority, certificate, key = (os.environ.get(f"LACONIC_ETCD_{name}") for name in ("CA", "CERT", "KEY"))
        client = Etcd3Client(shown, port, "https", authority, key, certificate, timeout=ANSWER_S)
        # Else REQUESTS_CA_BUNDLE, where it is set, counts more than the authority that was named.
        client.session.trust_env = authority is None
        return client

    def create(self, name: str, text: str) -> bool:
        return bool(self._ask(lambda member: member.create(self._prefix + name, text.encode())))

    def replace(self, name: str, text: str) -> None:
        self._ask(lambda member: member.put(self._prefix + name, text.encode()))

    def append(self, name: str, lines: Iterable[str]) -> None:
        for line in lines:
            key = f"{self._prefix}{name}/{time.time_ns():020d}-{secrets.token_hex(4)}"
            self._ask(lambda member, key=key, line=line: member.put(key, line.encode()))  # type: ignore[misc]

    def read(self, name: str) -> bytes | None:
        key = self._prefix + name
        end = f"{key}0"  # the character after the slash: with all that is below it, in one question
        # By when etcd got them: members' clocks may differ by hours.
        order = {"metadata": True, "sort_order": "ascend", "sort_target": "create"}
        found = self._ask(lambda member: member.get(key, range_end=end, **order))
        texts = {about["key"].decode(): bytes(text) for text, about in found}
        if key in texts:
            return texts[key]
        return b"".join(text + b"\n" for name, text in texts.items() if name.startswith(f"{key}/")) or None

    def names(self, prefix: str = "") -> list[str]:
        found = self._ask(lambda member: member.get_prefix(self._prefix + prefix))
        return sorted({about["key"].decode().removeprefix(self._prefix).split("/")[0] for _, about in found})

    def close(self) -> None:
        with self._lock:
            for member in self._members:
                member.session.close()

    def _ask(self, what: Callable[[Any], T]) -> T:
        """Ask the members in order until one answers; ask that one first the next time."""
        from etcd3gw.exceptions import Etcd3Exception

        failures: list[str] = []
        with self._lock:
            for member in list(self._members):
                try:
                    answer = self._with_login(member, what)
                # What listens there may not be etcd, and the client believes any JSON.
                except (Etcd3Exception, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                    failures.append(_reason(member, error))
                    self._members.append(self._members.pop(0))
                else:
                    return answer
        raise StorageError(f"the meeting place {self.where} does not answer: {'; '.join(failures)}")

    def _with_login(self, member: Any, what: Callable[[Any], T]) -> T:
        """Send a request; log in first if the token is missing or expired."""
        from etcd3gw.exceptions import Etcd3Exception

        if not self._user:
            return what(member)
        try:
            if "Authorization" in member.session.headers:
                return what(member)
        except Etcd3Exception:
            pass
        member.session.headers.pop("Authorization", None)
        login = {"name": self._user, "password": self._password}
        member.session.headers["Authorization"] = member.post(member.get_url("/auth/authenticate"), json=login)["token"]
        return what(member)


@PLACES.register("etcds")
class EncryptedEtcdPlace(EtcdPlace):
    """As `etcd`, over TLS."""

    _tls: ClassVar[bool] = True


def _reason(member: Any, error: Exception) -> str:
    text = getattr(error, "detail_text", None) or str(error) or type(error).__name__
    return f"{member.host}:{member.port}: {' '.join(str(text).split())[:200]}"
