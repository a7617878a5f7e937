"""Publication of a shard as an Iceberg table: its parts are the data files, so no row is copied.

1. *Pin* the contents by a tag: their blobs stay, whatever compaction and collection do.
2. Write what the parts lack, under a new snapshot id: deleted positions, rows of no part, manifests.
3. *Commit* by creating the metadata file of the next version, which no other publisher can replace.
4. Point the hint to it. Delete the files and pins of snapshots that are listed no more.

A publisher that is killed before the third step leaves the old table, later the new one, and files that the
next publication deletes. Nothing that a listed snapshot names is ever changed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from json import dumps
from typing import Any, NamedTuple

from aiopersist.base.errors import Conflict, InvalidUsage, UnknownShard, UnknownTag, UsageKind, shown
from aiopersist.base.frontier import Time
from aiopersist.base.supervisor import RELEASE_DEADLINE_S
from aiopersist.data.lazy import PARQUET
from aiopersist.iceberg import metadata
from aiopersist.iceberg.manifests import manifest_list
from aiopersist.iceberg.metadata import BaseVersion, TableSchemas
from aiopersist.iceberg.pins import Pins
from aiopersist.iceberg.table_folder import HINT, TableFolder, label_and_id, newest_of, superseded, version_in
from aiopersist.iceberg.write import ShardSchemas, SnapshotWriter, WrittenSnapshot
from aiopersist.maintenance.background import Maintenance
from aiopersist.read.handle import ReadHandle
from aiopersist.read.open import open_reader
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.storage.readonly import refuse

TRIES = 5  # against other publishers of the shard
ID_BITS = 62  # of the id of a snapshot, a positive number


class Published(NamedTuple):
    """A publication of a shard, which engines read."""

    shard: str
    """Its name."""
    as_of: Time
    """The time that it shows."""
    metadata: str
    """The URI of the metadata file of this version: it stays for `keep` publications."""
    location: str
    """The URI of the table's folder, for engines that find the newest version by its hint."""
    version: int
    snapshot_id: int
    rows: int
    data_files: int
    """Nearly all of them are parts of the shard."""
    bytes_written: int
    """By this call; 0 if the newest version shows that time already."""


async def publish(
    shards: Shards, maintenance: Maintenance, name: str, as_of: Time | datetime | None, keep: int
) -> Published:
    """See `Client.publish`."""
    if shards.stack.readonly:
        refuse("a publication")
    if type(keep) is not int or keep < 1:
        raise InvalidUsage(UsageKind.INVALID_TYPE, f"keep={shown(keep)} is not a positive int", keep=keep)
    await shards.stack.imported(*PARQUET)
    opening = open_reader(shards, name, None, hold=None, hold_name=None, lease_s=None, create=False)
    async with opening as reader:
        shard = reader._shard
        schemas = ShardSchemas.of(shard)
        with reader._scope.call():  # a refusal names the shard
            table = schemas.as_table
        folder = TableFolder.of(shards.stack.blob.uncached, name, shard.id)
        return await _Publisher(shards, maintenance, reader, shard, name, keep, folder, schemas, table).run(
            as_of
        )


async def unpublish(shards: Shards, name: str) -> int:
    """See `Client.unpublish`."""
    if shards.stack.readonly:
        refuse("the end of a publication")
    try:
        shard = await shards.existing(name)
    except UnknownShard:
        shard = None
    folder = TableFolder.of(shards.stack.blob.uncached, name, "")
    count = 0
    while True:
        files = await folder.files()
        await folder.remove([file for file in files if file == HINT or version_in(file) is not None])
        await folder.remove(files)
        pins = None if shard is None else Pins(shard, folder.name)
        names = await pins.held() if pins else {}
        if pins:
            await pins.release(names)
        count += len(files)
        if not files and not names:  # else a publisher may be about to commit
            return count


@dataclass(eq=False)
class _Publisher:
    """One call."""

    shards: Shards
    maintenance: Maintenance
    reader: ReadHandle[Any, Any]
    shard: Shard
    name: str
    keep: int
    folder: TableFolder
    schemas: ShardSchemas
    table: TableSchemas
    bytes: int = 0
    """That were written."""

    @property
    def pins(self) -> Pins:
        return Pins(self.shard, self.folder.name)

    async def run(self, as_of: Time | datetime | None) -> Published:
        """All steps, again after another publication of the shard came first."""
        async with self.reader.snapshot(as_of, wait=False) as source:
            time = source.as_of
        for _ in range(TRIES):
            base = await self._base()
            if self._shows(base, time):
                return await self._finished(base)
            written = await self._written(base.version + 1, time)
            version = await self._committed(base, written)
            if version is None:
                base = await self._base()
                if as_of is None and _is_at_least(base, time):
                    await self._undo(written.label, written.id)
                    return await self._finished(base)
                if base.version == written.label:  # else others may have deleted our files
                    version = await self._committed(base, written)
            if version is not None:
                return await self._finished(version, written)
            await self._undo(written.label, written.id)
        raise Conflict([(self.name, "publication")], shard_id=self.shard.id)

    async def _base(self) -> BaseVersion:
        """The newest version, with the snapshots that are pinned: somebody may have dropped a tag."""
        base = await self.folder.newest()
        return base.only(_ids(await self.pins.held())) if base.snapshots else base

    def _shows(self, base: BaseVersion, time: Time) -> bool:
        """Whether a version shows this time, by the newest schema."""
        newest, schema_id = base.newest, self.schemas.numbers[-1]
        return newest is not None and metadata.time_of(newest) == time and newest["schema-id"] == schema_id

    async def _written(self, label: int, time: Time) -> WrittenSnapshot:
        """Pin the shard, and write the files of a snapshot."""
        snapshot_id = self.shard.stack.runtime.uuid().int % 2**ID_BITS
        async with self._undoing(label, snapshot_id):
            pin = self.pins.name(label, snapshot_id)
            await self.pins.hold(self.shards, self.maintenance, pin, time)
            try:
                async with self.reader.snapshot(tag=pin) as source:
                    written = await SnapshotWriter(
                        self.folder, source, self.schemas, snapshot_id, label
                    ).run()
            except UnknownTag:  # an `unpublish` has dropped it
                raise Conflict([(self.name, "publication")], shard_id=self.shard.id) from None
        self.bytes += written.bytes
        return written

    @asynccontextmanager
    async def _undoing(self, label: int, snapshot_id: int) -> AsyncIterator[None]:
        """Undoes the snapshot, which no version names yet, if the body fails or is cancelled."""
        try:
            yield
        except BaseException:
            undoing = self.shard.stack.supervisor.spawn(self._undo(label, snapshot_id), "undo a publication")
            await asyncio.wait([undoing], timeout=RELEASE_DEADLINE_S)
            raise

    async def _undo(self, label: int, snapshot_id: int) -> None:
        """Delete the files of a snapshot that no version names, and its pin."""
        files = await self.folder.files()
        await self.folder.remove([file for file in files if label_and_id(file) == (label, snapshot_id)])
        await self.pins.release([self.pins.name(label, snapshot_id)])

    async def _committed(self, base: BaseVersion, written: WrittenSnapshot) -> BaseVersion | None:
        """The version after `base`, with this snapshot; `None` if there is one by somebody else."""
        version = base.version + 1
        file = f"metadata/{written.label}-{written.id}-list-{version}.avro"
        listed = manifest_list(written.id, version, written.manifests)
        uri = self.folder.uri(file)
        new = metadata.snapshot(written.id, base, written.label, written.as_of, uri, written.counts)
        stack = self.shard.stack
        table = metadata.following(
            base,
            new,
            self.keep,
            shard=self.shard.id,
            location=self.folder.uri(),
            uuid=str(stack.runtime.uuid()),
            schemas=self.table,
            now_ms=int(await stack.consensus.now() * 1000),
        )
        data = dumps(table).encode()
        async with self._undoing(written.label, written.id):
            await self.folder.put(file, listed)
        if not await self.folder.commit(version, data):
            return None
        self.bytes += len(listed) + len(data)
        return BaseVersion(version, table)

    async def _finished(self, base: BaseVersion, written: WrittenSnapshot | None = None) -> Published:
        """Point to a version that is committed, and delete what no version needs. `written`: this call has
        committed it."""
        files, pins = await self.folder.point_to(base.version), await self.pins.held()
        if written is not None and not (written.is_in(files) and base.ids <= _ids(pins)):
            await self._check_superseded(base, written)
        elif newest_of(files) == base.version:  # else its publisher does it
            await self.folder.remove(superseded(files, base.version, self.keep, base.ids))
            last, ids = base.version - self.keep, base.ids
            await self.pins.release([n for n, (label, of) in pins.items() if label <= last and of not in ids])
        newest = base.newest
        assert newest is not None
        count = {name: int(newest["summary"][f"total-{name}"]) for name in _COUNTS}
        return Published(
            shard=self.name,
            as_of=metadata.time_of(newest),
            metadata=self.folder.uri(f"metadata/{metadata.file_of(base.version)}"),
            location=self.folder.uri(),
            version=base.version,
            snapshot_id=newest["snapshot-id"],
            rows=count["records"] - count["position-deletes"],
            data_files=count["data-files"],
            bytes_written=self.bytes,
        )

    async def _check_superseded(self, base: BaseVersion, written: WrittenSnapshot) -> None:
        """For a version that misses files or pins: another publisher has superseded it, or an `unpublish` has
        begun before it was committed. Then `Conflict`, without the version."""
        files = await self.folder.files()
        if newest_of(files) > base.version:
            return
        await self.folder.remove([file for file in files if version_in(file) == base.version])
        await self.folder.correct_hint()
        await self._undo(written.label, written.id)
        raise Conflict([(self.name, "publication")], shard_id=self.shard.id)


def _ids(pins: Mapping[str, tuple[int, int]]) -> set[int]:
    """The ids of the pinned snapshots."""
    return {snapshot_id for _, snapshot_id in pins.values()}


_COUNTS = ("records", "position-deletes", "data-files")


def _is_at_least(base: BaseVersion, time: Time) -> bool:
    """Whether a version shows this time or a later one. Int times only."""
    shown_time = None if base.newest is None else metadata.time_of(base.newest)
    return isinstance(shown_time, int) and isinstance(time, int) and shown_time >= time
