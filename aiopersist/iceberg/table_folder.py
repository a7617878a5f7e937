"""The files of one publication in the blob store, outside of the folders of shards.

    iceberg/orders/metadata/v7.metadata.json        a version of the table, written once
    iceberg/orders/metadata/version-hint.text       the number of the newest version
    iceberg/orders/metadata/7-84...-list-7.avro     what the snapshot of a version names; so are
    iceberg/orders/data/7-84...-deletes-0.parquet

A version is committed by the creation of its metadata file. A file of a snapshot begins with its *label*, the
version for which it was written, and the id of the snapshot. Files of other names are left alone: engines
may write into the folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256

from aiopersist.base.errors import Unsupported
from aiopersist.iceberg.metadata import BaseVersion, file_of, version_of
from aiopersist.storage.blob import Blob

FOLDER = "iceberg"
HINT = "metadata/version-hint.text"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE = re.compile(r"(?:metadata|data)/(\d+)-(\d+)-[a-z0-9-]+\.(?:avro|parquet)")
_REPARSED = re.compile(r"[#?%]")  # engines take these for more than characters of a path


@dataclass(frozen=True, slots=True)
class TableFolder:
    """See the header."""

    blob: Blob
    prefix: str
    shard: str
    """The id of the shard."""

    @property
    def name(self) -> str:
        """The last part of the prefix."""
        return self.prefix.rpartition("/")[2]

    @classmethod
    def of(cls, blob: Blob, name: str, shard: str) -> TableFolder:
        """The folder of the shard of that name. `Unsupported` if other programs cannot read the store."""
        if _REPARSED.search(blob.uri):
            raise Unsupported(
                f"{blob.uri}: engines cannot read a table at a place with #, ? or % in its path"
            )
        return cls(blob, f"{FOLDER}/{folder_of(name)}", shard)

    def uri(self, file: str = "") -> str:
        """The absolute URI of a file, or of the folder."""
        return f"{self.blob.uri}/{self.prefix}/{file}".rstrip("/")

    def uri_of_part(self, key: str) -> str:
        """The absolute URI of a part."""
        return f"{self.blob.uri}/{key}"

    def key(self, file: str) -> str:
        return f"{self.prefix}/{file}"

    async def put(self, file: str, data: bytes) -> None:
        """Write a file of a snapshot."""
        await self.blob.set(self.key(file), data)

    async def commit(self, version: int, data: bytes) -> bool:
        """Write the metadata of a version, unless there is such a version; whether it is this one."""
        key = self.key(f"metadata/{file_of(version)}")
        return await self.blob.create(key, data) or await self.blob.get(key) == data

    async def files(self) -> list[str]:
        """All files in the folder. A request for every thousand."""
        begin = len(self.prefix) + 1
        return [key[begin:] async for key, _ in self.blob.list(f"{self.prefix}/")]

    async def newest(self) -> BaseVersion:
        """The newest version; number 0 before the first."""
        version = newest_of(await self.files())
        if not version:
            return BaseVersion()
        data = await self.blob.get(self.key(f"metadata/{file_of(version)}"))
        return BaseVersion.of(version, data, self.shard, self.uri())

    async def point_to(self, version: int) -> list[str]:
        """Let the hint name the newest version, which is at least this one. Returns all files."""
        while True:
            await self.blob.set(self.key(HINT), str(version).encode())
            files = await self.files()
            newest = newest_of(files)
            if newest <= version:  # else another publisher may have set its hint before ours
                return files
            version = newest

    async def correct_hint(self) -> None:
        """Let the hint name the newest version, after one was deleted; delete it if there is no version."""
        newest = newest_of(await self.files())
        while newest and (present := newest_of(await self.point_to(newest))) < newest:
            newest = present
        if not newest:
            await self.remove([HINT])

    async def remove(self, files: Collection[str]) -> None:
        """Delete these files."""
        await self.blob.delete([self.key(file) for file in files])


def folder_of(name: str) -> str:
    """The name of the folder of a shard: its own name, or one of plain characters with a checksum."""
    if _PLAIN.fullmatch(name):
        return name
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[:60]
    return f"{plain or 'shard'}-{sha256(name.encode()).hexdigest()[:12]}"


def is_folder(name: str) -> bool:
    """Whether a folder of a publication may have that name."""
    return re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII) is not None


def newest_of(files: Collection[str]) -> int:
    """The number of the newest version among the files; 0 without any."""
    return max((version for file in files if (version := version_in(file)) is not None), default=0)


def superseded(files: Collection[str], newest: int, keep: int, snapshots: Collection[int]) -> list[str]:
    """The files that no kept version needs, where `newest` is the newest version, and `snapshots` are the ids
    of those that it lists. Files with one of the last `keep` labels stay: another publisher may be about to
    commit them."""
    return [file for file in files if _is_superseded(file, newest - keep, snapshots)]


def label_and_id(name: str) -> tuple[int, int] | None:
    """The label and the id in the name of a file or of a pin; `None` for other names."""
    match = _FILE.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _is_superseded(file: str, last: int, snapshots: Collection[int]) -> bool:
    version, of = version_in(file), label_and_id(file)
    if version is not None:
        return version <= last
    return of is not None and of[0] <= last and of[1] not in snapshots


def version_in(file: str) -> int | None:
    """The number of the version whose metadata the file is; `None` for other files."""
    folder, _, name = file.partition("/")
    return version_of(name) if folder == "metadata" else None
