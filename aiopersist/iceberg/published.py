"""The published tables of a location, for catalogs. Pure reads of the blob store."""

from __future__ import annotations

from json import loads
from typing import Any, NamedTuple

from aiopersist.iceberg.metadata import file_of
from aiopersist.iceberg.table_folder import FOLDER, is_folder, newest_of, version_in
from aiopersist.storage.blob import Blob


class NewestVersion(NamedTuple):
    """The newest version of a published table."""

    uri: str
    """Of its metadata file."""
    table: dict[str, Any]
    """The contents of that file."""


async def published_tables(blob: Blob) -> list[str]:
    """The names of the folders of published tables. A request for every thousand files of all."""
    names = set()
    async for key, _ in blob.list(f"{FOLDER}/"):
        folder, _, file = key.removeprefix(f"{FOLDER}/").partition("/")
        if version_in(file) is not None:
            names.add(folder)
    return sorted(names)


async def newest_version(blob: Blob, folder: str) -> NewestVersion | None:
    """The newest version of the table in that folder; `None` if there is none. Two requests."""
    if not is_folder(folder):
        return None
    place = f"{FOLDER}/{folder}/"
    while version := newest_of([key.removeprefix(place) async for key, _ in blob.list(place)]):
        key = f"{place}metadata/{file_of(version)}"
        if (data := await blob.get(key)) is not None:  # else it was superseded, or unpublished, meanwhile
            return NewestVersion(f"{blob.uri}/{key}", loads(data))
    return None
