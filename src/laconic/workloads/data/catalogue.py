"""The registry of datasets: `@dataset(name)` on a reader registers it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from laconic.errors import BadInput
from laconic.registry import Registry
from laconic.workloads.data.collection import Collection
from laconic.workloads.data.split import Dataset

Reader = Callable[..., Dataset]
REGISTRY: Registry[tuple[Reader, tuple[Collection, ...]]] = Registry("dataset")
names = REGISTRY.names


def dataset(name: str, *collections: Collection) -> Callable[[Reader], Reader]:
    """Decorator: register a reader `(contents, source, **options) -> Dataset`.

    Args:
        name: as given to `load`.
        collections: published files the dataset can be read from, in order of preference; the first with addresses is
            downloaded. None for data that come with a package or are made.
    """

    def add(reader: Reader) -> Reader:
        REGISTRY.add(name, (reader, collections))
        return reader

    return add


def load(name: str, folder: str | Path | None = None, *, download: bool = True, **options: Any) -> Dataset:
    """Read a dataset into memory.

    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test), digits.source
    (1438, 359, 'scikit-learn')

    Args:
        name: one of `names()`.
        folder: read here and nowhere else; None looks in LACONIC_DATA, `data/`, then where distributions install it.
        download: bring what is missing from its public address (never into a `folder` that was named).
        options: of the dataset, such as the `length` of a text's windows.

    Raises:
        UnknownName: no such dataset.
        BadInput: it is not there and could not be downloaded; the sentence says what to do.
        PayloadError: a file is corrupt.
    """
    reader, collections = REGISTRY.get(name)
    if not collections:
        return reader(**options)
    contents, source = _contents(collections, folder, download)
    return reader(contents, source, **options)


def fetch(name: str, folder: str | Path | None = None) -> str:
    """Make sure a dataset is on this machine, before workers are started; returns where it is or came from."""
    _, collections = REGISTRY.get(name)
    return _contents(collections, folder, True)[1] if collections else "needs no file"


def _contents(
    collections: tuple[Collection, ...], folder: str | Path | None, download: bool
) -> tuple[dict[str, bytes], str]:
    for collection in collections:
        found = collection.read(folder)
        if found is not None:
            return found
    sentence = " or ".join(dict.fromkeys(collection.missing(folder) for collection in collections))
    public = next((c for c in collections if c.archive_urls or all(file.urls for file in c.files)), None)
    if folder is not None or not download or public is None:
        raise BadInput(sentence)
    try:
        source = public.fetch()
    except BadInput as error:
        raise BadInput(f"{sentence}; {error}") from error
    found = public.read()
    if found is None:
        raise BadInput(sentence)
    return found[0], source
