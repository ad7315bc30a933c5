"""Finds the files of a published dataset, checks them, unpacks archives once, and downloads what is missing.

Callers: the dataset files beside this one. A `Collection` names the files with the SHA-256 of their *contents*, so
that a plain file, a `.gz` of it and a member of an archive are all checked against the same figure, whoever compressed
it. Folders are looked at in this order: the one the user names and no other; or LACONIC_DATA, `data/` in the current
folder, and the places where distributions install the dataset. In each, the dataset's own sub-folder comes first.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import BadInput, PayloadError, StorageError
from laconic.storage.files import writing
from laconic.workloads.data.download import download, placed


@dataclass(frozen=True)
class File:
    """A file of a dataset: its name without `.gz`, the SHA-256 of its contents, and where it can be downloaded."""

    name: str
    sha256: str
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collection:
    """The files of one dataset.

    Attributes:
        name: the sub-folder they live in.
        title: as a sentence names the dataset.
        files: what is read; for an archive, its members.
        archives: names of tar archives that hold all of `files`, in any folder of the archive.
        archive_urls: addresses of the first of `archives`.
        folders: where distributions install the files.
    """

    name: str
    title: str
    files: tuple[File, ...]
    archives: tuple[str, ...] = ()
    archive_urls: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    def read(self, folder: str | Path | None = None) -> tuple[dict[str, bytes], str] | None:
        """The checked contents of every file and the folder they came from; None when they are nowhere.

        Raises:
            PayloadError: a file is there but is not the published one.
        """
        places = self._places(folder)
        for place in places:
            if all(_stored(place, file.name) for file in self.files):
                return {file.name: _checked(place, file) for file in self.files}, str(place)
        for place in places:
            for name in self.archives:
                if (place / name).is_file():
                    unpacked = Path("data").resolve() / self.name  # a data folder may be shared: leave it as it is
                    self._extract(place / name, unpacked)
                    return {file.name: _checked(unpacked, file) for file in self.files}, str(place / name)
        return None

    def fetch(self) -> str:
        """Download the files into LACONIC_DATA, else `data/`; returns the address of the first."""
        target = cache_folder() / self.name
        if self.archive_urls:
            path = target / self.archives[0]
            # The members are checked, not the archive: they are what is used.
            source = download(self.archive_urls, path, lambda temporary: self._extract(temporary, target))
            path.unlink()
            return source
        sources = [self._fetch_file(file, target) for file in self.files if not _stored(target, file.name)]
        return sources[0] if sources else str(target)

    def _fetch_file(self, file: File, target: Path) -> str:
        suffix = ".gz" if file.urls[0].endswith(".gz") and not file.name.endswith(".gz") else ""
        path = target / f"{file.name}{suffix}"
        return download(file.urls, path, lambda temporary: _check(_contents(temporary, suffix), file, path))

    def missing(self, folder: str | Path | None = None) -> str:
        """One sentence: what is not there, where it was looked for, and the cure."""
        looked = ", ".join(str(root) for root in _roots(folder))
        wanted = self.archives[0] if self.archives else ", ".join(file.name for file in self.files)
        return (
            f"{self.title} is not in {looked}: put {wanted} in a folder {self.name}/ there, or set LACONIC_DATA to the "
            f"folder that holds {self.name}/"
        )

    def _places(self, folder: str | Path | None) -> list[Path]:
        system = [] if folder is not None else [Path(path) for path in self.folders]
        return [*(place for root in _roots(folder) for place in (root / self.name, root)), *system]

    def _extract(self, archive: Path, target: Path) -> None:
        """Write the wanted members of a tar archive into `target`, each checked and put in place at once."""
        wanted = {file.name: file for file in self.files if not (target / file.name).is_file()}
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    file = wanted.pop(Path(member.name).name, None)
                    stream = tar.extractfile(member) if file is not None else None
                    if file is None or stream is None:
                        continue
                    content = stream.read()
                    _check(content, file, archive)
                    with placed(target / file.name) as temporary, writing(target / file.name):
                        temporary.write_bytes(content)
        except StorageError:
            raise
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise PayloadError(f"{archive} is not a whole tar archive ({error}); delete it and try again") from error
        if wanted:
            raise PayloadError(f"{archive} does not hold {', '.join(wanted)}")


def cache_folder() -> Path:
    """Where downloads go: LACONIC_DATA when it may be written (root heeds its mode too), else `data/` here."""
    named = Path(os.environ.get("LACONIC_DATA") or "data").resolve()
    read_only = named.is_dir() and not (named.stat().st_mode & stat.S_IWUSR and os.access(named, os.W_OK))
    return Path("data").resolve() if read_only else named


def _roots(folder: str | Path | None) -> list[Path]:
    """The folders looked at, in order. Raises BadInput when the one the user names is not there."""
    if folder is not None:
        if not Path(folder).is_dir():
            raise BadInput(f"the data folder {folder} does not exist")
        return [Path(folder).resolve()]
    named = os.environ.get("LACONIC_DATA")
    if named and not Path(named).is_dir():
        raise BadInput(f"LACONIC_DATA is {named}, which is not a folder; correct it or unset it")
    return list(dict.fromkeys([Path(named or "data").resolve(), Path("data").resolve()]))


def _stored(place: Path, name: str) -> bool:
    return (place / name).is_file() or (place / f"{name}.gz").is_file()


def _checked(place: Path, file: File) -> bytes:
    plain = (place / file.name).is_file()
    path = place / (file.name if plain else f"{file.name}.gz")
    content = _contents(path, "" if plain else ".gz")
    _check(content, file, path)
    return content


def _contents(path: Path, suffix: str) -> bytes:
    """The bytes of a file, decompressed when `suffix` is .gz."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from error
    return gunzip(content, str(path)) if suffix else content


def _check(content: bytes, file: File, path: Path) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise PayloadError(
            f"{path} does not hold the published {file.name}: SHA-256 {found[:16]}… of its contents, not "
            f"{file.sha256[:16]}…; delete it to have it downloaded"
        )


def gunzip(content: bytes, name: str) -> bytes:
    """The decompressed bytes of a file."""
    try:
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PayloadError(f"{name} is not a whole gzip file ({error}); delete it to have it downloaded") from error
