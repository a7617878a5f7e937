"""The metadata of a published table: the JSON of its versions.

Each version is a file of its own, which is written once and lists the newest snapshots. A snapshot lists all
its files anew, is of the kind `overwrite`, and names no parent. So a reader of increments, who would take all
rows for new ones, finds no append and no way from one snapshot to the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from json import dumps, loads
from typing import Any, NamedTuple, Self

from aiopersist.base.frontier import Time

AS_OF = "aiopersist.as-of"  # of a snapshot: the time of the shard that it shows
LABEL = "aiopersist.label"  # of a snapshot: the version for which its files were written
SHARD = "aiopersist.shard"  # of a table: the id of the shard
NAME_MAPPING = "schema.name-mapping.default"
_FILE = re.compile(r"v([1-9][0-9]{0,8})\.metadata\.json")  # engines read the number as a Java int


class BaseVersion(NamedTuple):
    """The version that the next one follows: its number, and its JSON if it is a publication of the shard."""

    version: int = 0
    table: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, version: int, data: bytes | None, shard: str, location: str) -> Self:
        """The version with these bytes. A table of another shard, which had the same name, of a folder that
        was moved, or of a program that is not this library, only has a number."""
        table = own_table(data)
        is_of_shard = table is not None and (table["properties"][SHARD], table["location"]) == (
            shard,
            location,
        )
        return cls(version, table if is_of_shard else None)

    @property
    def snapshots(self) -> list[dict[str, Any]]:
        """The snapshots that this library wrote, the oldest first."""
        snapshots = self.table["snapshots"] if self.table else []
        return [s for s in snapshots if AS_OF in s.get("summary", {})]

    @property
    def ids(self) -> set[int]:
        """The ids of these snapshots."""
        return {snapshot["snapshot-id"] for snapshot in self.snapshots}

    def only(self, ids: Collection[int]) -> Self:
        """The same version with only those of its snapshots."""
        if self.table is None:
            return self
        kept = [snapshot for snapshot in self.snapshots if snapshot["snapshot-id"] in ids]
        return self._replace(table={**self.table, "snapshots": kept})

    @property
    def newest(self) -> dict[str, Any] | None:
        """The newest of these."""
        return self.snapshots[-1] if self.snapshots else None


class TableSchemas(NamedTuple):
    """The schemas of the shard as Iceberg's, the oldest first, and the greatest field id."""

    schemas: Sequence[Mapping[str, Any]]
    last_column: int
    name_mapping: Sequence[Mapping[str, Any]]


def own_table(data: bytes | None) -> dict[str, Any] | None:
    """The JSON of a version; `None` unless this library wrote it."""
    try:
        table: dict[str, Any] = loads(data or b"null")
        is_own = isinstance(table["properties"][SHARD], str) and isinstance(table["location"], str)
        return table if is_own and isinstance(table["snapshots"], list) else None
    except (ValueError, LookupError, TypeError):
        return None


def version_of(file: str) -> int | None:
    """The number of a metadata file; `None` for other files."""
    match = _FILE.fullmatch(file)
    return int(match[1]) if match else None


def file_of(version: int) -> str:
    """The name of the metadata file of a version."""
    return f"v{version}.metadata.json"


def time_of(snapshot: Mapping[str, Any]) -> Time:
    """The time of the shard that a snapshot shows."""
    time: Any = loads(snapshot["summary"][AS_OF])
    return tuple(time) if isinstance(time, list) else time


def snapshot(
    id: int, base: BaseVersion, label: int, as_of: Any, manifest_list: str, counts: Mapping[str, int]
) -> dict[str, Any]:
    """The snapshot that follows `base`. Its sequence number is the number of its version. `counts` are of its
    files and rows."""
    counted = {name: str(count) for name, count in counts.items()}
    summary = {"operation": "overwrite", AS_OF: dumps(as_of), LABEL: str(label), **counted}
    return {
        "snapshot-id": id,
        "sequence-number": base.version + 1,
        "manifest-list": manifest_list,
        "summary": summary,
    }


def following(
    base: BaseVersion,
    snapshot: Mapping[str, Any],
    keep: int,
    *,
    shard: str,
    location: str,
    uuid: str,
    schemas: TableSchemas,
    now_ms: int,
) -> dict[str, Any]:
    """The JSON of the version after `base`: with this snapshot, and `keep` snapshots in all."""
    table = base.table or {}
    older = base.snapshots[max(len(base.snapshots) - keep + 1, 0) :]
    now_ms = max([now_ms, *(each["timestamp-ms"] + 1 for each in older)])
    schema_id = schemas.schemas[-1]["schema-id"]
    snapshots = [*older, {**snapshot, "timestamp-ms": now_ms, "schema-id": schema_id}]
    log = [{name: s[name] for name in ("snapshot-id", "timestamp-ms")} for s in snapshots]
    return {
        "format-version": 2,
        "table-uuid": table.get("table-uuid", uuid),
        "location": location,
        "last-sequence-number": snapshot["sequence-number"],
        "last-updated-ms": now_ms,
        "last-column-id": schemas.last_column,
        "current-schema-id": schema_id,
        "schemas": list(schemas.schemas),
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "last-partition-id": 999,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {"gc.enabled": "false", SHARD: shard, NAME_MAPPING: dumps(schemas.name_mapping)},
        "current-snapshot-id": snapshot["snapshot-id"],
        "refs": {"main": {"snapshot-id": snapshot["snapshot-id"], "type": "branch"}},
        "snapshots": snapshots,
        "snapshot-log": log,
        "metadata-log": [],
    }
