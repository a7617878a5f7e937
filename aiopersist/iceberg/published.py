"""The published tables of a location, for catalogs and erasures. Pure reads of the blob store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from aiopersist.base.errors import Unsupported
from aiopersist.base.frontier import Antichain
from aiopersist.iceberg.metadata import file_of, own_table, time_of
from aiopersist.iceberg.table_folder import (
    FOLDER,
    TableFolder,
    is_folder,
    label_and_id,
    version_in,
)
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
    """The newest version of the table in that folder that this library wrote; `None` if there is none. Two
    requests, and one for each later version of somebody else."""
    if not is_folder(folder):
        return None
    place = f"{FOLDER}/{folder}/"
    while versions := _versions([key.removeprefix(place) async for key, _ in blob.list(place)]):
        for version in versions:
            key = f"{place}metadata/{file_of(version)}"
            if (data := await blob.get(key)) is None:  # it was superseded, or unpublished, meanwhile
                break
            if (table := own_table(data)) is not None:
                return NewestVersion(f"{blob.uri}/{key}", table)
        else:
            break
    return None


async def files_before(blob: Blob, names: Iterable[str], shard: str, since: Antichain) -> list[str]:
    """The keys of files of published snapshots that do not show a time at or beyond `since`, or that no
    version lists: they may have rows, and bounds of rows, from before. `names` are those of the shard. Two
    requests for each name."""
    keys: list[str] = []
    for name in names:
        try:
            folder = TableFolder.of(blob, name, shard)
        except Unsupported:  # nothing is published there
            continue
        files = await folder.files()
        snapshots = (await folder.newest()).snapshots if files else []
        recent = {s["snapshot-id"] for s in snapshots if since.less_equal(time_of(s))}
        named = ((file, label_and_id(file)) for file in files)
        keys += [folder.key(file) for file, of in named if of is not None and of[1] not in recent]
    return keys


def _versions(files: Iterable[str]) -> list[int]:
    """The numbers of the versions among the files, the newest first."""
    return sorted((v for file in files if (v := version_in(file)) is not None), reverse=True)
