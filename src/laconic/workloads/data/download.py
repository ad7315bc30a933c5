"""Download one file: streamed with a progress bar, checked, and only then moved into place.

Callers: `collection.py`. Invariant: the target either does not exist or is whole and checked; a stopped download leaves
nothing behind under its name.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from laconic.errors import BadInput, PayloadError, StorageError
from laconic.storage.files import replacing, writing

CHUNK_NBYTES = 1 << 18
TIMEOUT_S = 30.0


def download(urls: tuple[str, ...], target: Path, check: Callable[[Path], None]) -> str:
    """Download `target` from the first address that serves it completely; returns that address.

    Args:
        urls: addresses of the same file, tried in turn.
        target: where it goes; its folder is made.
        check: raises PayloadError when the file it is given is not the right one.

    Raises:
        BadInput: no address could be reached, or the folder cannot be written.
        PayloadError: the last address reached served another file.
    """
    failure: Exception | None = None
    for url in urls:
        try:
            with placed(target) as temporary:
                _stream(url, temporary, target.name)
                check(temporary)
            return url
        except PayloadError as error:
            failure = error
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", None) or error
            failure = BadInput(f"{url} could not be downloaded ({reason})")
    raise failure or BadInput(f"there is no address for {target.name}")


@contextmanager
def placed(target: Path) -> Iterator[Path]:
    """A temporary path to write that becomes `target` when the block ends well, and disappears when it does not."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(replacing(target))
        except StorageError as error:
            raise BadInput(f"{error}; set LACONIC_DATA to a folder that can be written") from error
        yield Path(file.name)


def _stream(url: str, target: Path, name: str) -> None:
    """Copy what `url` serves into `target`, showing progress on a terminal; a short answer raises PayloadError."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    request = urllib.request.Request(url, headers={"User-Agent": "laconic"})
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer,
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
        open(target, "wb") as stream,
    ):
        length = answer.headers.get("Content-Length")
        bar = progress.add_task(name, total=int(length) if length else None)
        received = 0
        while chunk := answer.read(CHUNK_NBYTES):
            with writing(target):
                stream.write(chunk)
            received += len(chunk)
            progress.update(bar, advance=len(chunk))
        if length and received != int(length):
            raise PayloadError(f"{url} ended after {received} of {length} bytes; try again")
