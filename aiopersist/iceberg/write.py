"""The files of one snapshot: deleted positions, rows of no part, and the manifests that list all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from aiopersist.base.frontier import Time
from aiopersist.base.resource import run_bounded
from aiopersist.data.lazy import pa
from aiopersist.data.types.field_ids import field_ids, with_field_ids
from aiopersist.iceberg.bounds import metrics
from aiopersist.iceberg.files import FILE_PATH_ID, Tail, deletes_file
from aiopersist.iceberg.manifests import DATA, DELETES, ListedFile, ListedManifest, manifest
from aiopersist.iceberg.metadata import TableSchemas
from aiopersist.iceberg.positions import Deletions
from aiopersist.iceberg.surplus import ROW, Positions
from aiopersist.iceberg.table_folder import TableFolder, label_and_id
from aiopersist.iceberg.types import Ids, leaves, name_mapping, schema_json
from aiopersist.read.snapshot import Snapshot
from aiopersist.shard.shard import Shard

DIFFERENCES_SHARE = 16  # of the memory of a compaction: their sums, and the keys to look for, need a multiple


class ShardSchemas(NamedTuple):
    """The schemas of a shard, the oldest first, and their field ids."""

    numbers: Sequence[int]
    arrow: Sequence[pa.Schema]
    ids: Ids

    @classmethod
    def of(cls, shard: Shard) -> ShardSchemas:
        numbers = sorted(shard.state.schemas)
        arrow = [shard.schema(number).arrow_schema for number in numbers]
        return cls(numbers, arrow, field_ids(arrow))

    @property
    def as_table(self) -> TableSchemas:
        """`Unsupported` for a type that engines cannot read."""
        pairs = zip(self.numbers, self.arrow, strict=True)
        schemas = [schema_json(schema, self.ids, number) for number, schema in pairs]
        return TableSchemas(schemas, max(self.ids.values()), name_mapping(self.arrow[-1], self.ids))

    @property
    def shown(self) -> pa.Schema:
        """The columns that engines show, with their ids."""
        newest = with_field_ids(self.arrow)
        return pa.schema([newest.field(name) for name in ROW])


class WrittenSnapshot(NamedTuple):
    """The files of a snapshot that is not committed yet."""

    id: int
    label: int
    as_of: Time
    manifests: Sequence[ListedManifest]
    files: int
    """That were written."""
    bytes: int
    """Of these files."""

    def is_in(self, files: Iterable[str]) -> bool:
        """Whether all its files are among these, and the list of its manifests, too."""
        own = sum(label_and_id(file) == (self.label, self.id) for file in files)
        return own > self.files

    @property
    def counts(self) -> dict[str, int]:
        """The totals for the summary of the snapshot."""
        by_content = {each.content: each.files for each in self.manifests}
        data, deletes = by_content.get(DATA, ()), by_content.get(DELETES, ())
        return {
            "total-data-files": len(data),
            "total-delete-files": len(deletes),
            "total-records": sum(file.rows for file in data),
            "total-position-deletes": sum(file.rows for file in deletes),
            "total-equality-deletes": 0,
            "total-files-size": sum(file.size for file in [*data, *deletes]),
        }


@dataclass(eq=False)
class SnapshotWriter:
    """Writes the files of the snapshot `id` with this label, which shows `source`."""

    folder: TableFolder
    source: Snapshot[Any, Any]
    schemas: ShardSchemas
    id: int
    label: int
    _files: int = 0
    _bytes: int = 0
    _tail: list[ListedFile] = field(default_factory=list)

    async def run(self) -> WrittenSnapshot:
        """Write all files, and return them."""
        positions = await self._deletions()
        parts = {part.key: part for _, part in self.source._parts if part.key is not None}
        live = {key: part for key, part in parts.items() if len(positions.get(key, ())) < part.rows}
        jobs = [partial(self._delete, key, positions[key]) for key in live if key in positions]
        deletes = await run_bounded(self.source._fetch.stack.settings.fetch_max_outstanding_parts, jobs)
        data = await self.source._fetch.stack.compute(self._data_files, list(live.values()))
        contents = ((DATA, [*data, *self._tail]), (DELETES, deletes))
        manifests = [await self._manifest(content, files) for content, files in contents if files]
        return WrittenSnapshot(self.id, self.label, self.source.as_of, manifests, self._files, self._bytes)

    async def _deletions(self) -> Mapping[str, Positions]:
        """The deleted positions by blob key. Writes the rows of no part meanwhile."""
        source, settings = self.source, self.source._fetch.stack.settings
        compute, limit = source._fetch.stack.compute, settings.compaction_memory_bytes // DIFFERENCES_SHARE
        tail = Tail(self.schemas.shown, compute, self._put_rows, settings.blob_target_size or limit)
        deletions = Deletions(source._fetch, source._parts, source._reader, source.as_of, tail.add, limit)
        positions = await deletions.run()
        await tail.flush()
        return {key: rows for key, rows in positions.items() if len(rows)}

    async def _put_rows(self, data: bytes, rows: int) -> None:
        uri = await self._put(f"data/{self.label}-{self.id}-rows-{len(self._tail)}.parquet", data)
        self._tail.append(ListedFile(uri, rows, len(data)))

    async def _delete(self, key: str, positions: Positions) -> ListedFile:
        """The file of the positions that are deleted in one part."""
        of = self.folder.uri_of_part(key)
        data = await self.source._fetch.stack.compute(deletes_file, of, positions)
        part = key.rpartition("/")[2].removesuffix(".parquet")
        uri = await self._put(f"data/{self.label}-{self.id}-deletes-{part}.parquet", data)
        bounds = {FILE_PATH_ID: of.encode()}
        return ListedFile(
            uri, len(positions), len(data), {"lower_bounds": bounds, "upper_bounds": bounds}, of
        )

    def _data_files(self, parts: Sequence[Any]) -> list[ListedFile]:
        columns, ids = leaves(self.schemas.arrow[-1]), self.schemas.ids
        return [
            ListedFile(
                self.folder.uri_of_part(part.key),
                part.rows,
                part.size,
                metrics(part.stats, part.rows, columns, ids),
            )
            for part in parts
        ]

    async def _manifest(self, content: int, files: Sequence[ListedFile]) -> ListedManifest:
        schema = self.schemas.as_table.schemas[-1]
        data = await self.source._fetch.stack.compute(manifest, schema, self.id, content, files)
        kind = ("data", "deletes")[content]
        uri = await self._put(f"metadata/{self.label}-{self.id}-{kind}.avro", data)
        return ListedManifest(uri, len(data), content, files)

    async def _put(self, file: str, data: bytes) -> str:
        await self.folder.put(file, data)
        self._files += 1
        self._bytes += len(data)
        return self.folder.uri(file)
