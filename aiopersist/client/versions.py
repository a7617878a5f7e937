"""The calls of a client that keep contents of the past: tags, and publications for other engines."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from aiopersist.base.errors import shown
from aiopersist.base.frontier import Time
from aiopersist.client.services import BaseClient

if TYPE_CHECKING:
    from aiopersist.iceberg.publish import Published
    from aiopersist.maintenance.tags import TagView
    from aiopersist.table.table import Table


class VersionCalls(BaseClient):
    """See the header."""

    async def tag(
        self,
        shard: str | Table[Any, Any],
        name: str,
        as_of: Time | datetime | None = None,
        *,
        expires: timedelta | None = None,
    ) -> TagView:
        """Keep the contents of a shard or table at `as_of` (`None`: the greatest complete time) under `name`,
        whatever retention, compaction and collection do later: `snapshot(tag=name)` reads them until `untag`,
        or until a commit after `expires`. The history between tags is not kept. The shard keeps the blobs of
        the tag, and its state about 170 bytes in memory for each of them, 30 in a rollup. Releases before
        0.3 cannot open a shard that has a tag. One blob and one commit, one more for a registration.

        `TagExists` if another tag has the name; `SinceViolation` if the history is gone already,
        `NotReadable` if the time is not complete; `INVALID_TIME`, `INVALID_NAME`; `UnknownShard`. After
        `Indeterminate`, or if the call was cancelled, call again: `TagExists` says that it happened."""
        async with self._services.calling("aiopersist.maintenance.tags"):
            from aiopersist.maintenance.tags import add_tag

            services = self._services
            return await add_tag(services.shards, services.maintenance, _name_of(shard), name, as_of, expires)

    async def tags(self, shard: str | Table[Any, Any]) -> dict[str, TagView]:
        """The tags of a shard or table, by name. Linearizable: one request."""
        async with self._services.calling("aiopersist.maintenance.tags"):
            from aiopersist.maintenance.tags import tags

            return await tags(self._services.shards, _name_of(shard))

    async def untag(self, shard: str | Table[Any, Any], name: str) -> None:
        """Drop the tag of that name: the next collection deletes the blobs that nothing else names, once the
        snapshots of it are closed. `UnknownTag` if there is none. One commit."""
        async with self._services.calling("aiopersist.maintenance.tags"):
            from aiopersist.maintenance.tags import drop_tag

            await drop_tag(self._services.shards, _name_of(shard), name)

    async def publish(
        self, shard: str | Table[Any, Any], *, as_of: Time | datetime | None = None, keep: int = 3
    ) -> Published:
        """Publish the contents of the shard or table at `as_of` (`None`: the greatest complete time) as an
        Iceberg table (format version 2), which Spark, polars and other engines read without this library. Its
        columns are `key` and `val`. The parts of the shard are its data files: only what they lack is
        written, below `iceberg/` in the blob store: deleted positions, and rows that are inline.

        The last `keep` versions stay readable, each by its metadata file, whatever compaction, collection
        and sweep do: a tag keeps their blobs. Older versions, their files and tags are removed. After a crash
        or a publication by somebody else the table has the version before, or a whole new one. A call with
        nothing new to show writes nothing. Releases before 0.3 cannot open a shard that has tags.

        `Unsupported`, with the path of the field, for a type that not all engines have (unsigned, time of
        day, duration, nanoseconds, null, a zone other than UTC, decimals beyond 38 digits), for a store that
        other programs cannot read (`mem://`), and for a row with millions of copies; `NegativeMultiplicity`
        for a row with fewer than zero copies; errors of times as for `tag`; `Conflict` if others published
        first several times, or unpublished meanwhile.

        A commit for the tag, one for each old tag, perhaps one for a registration; requests for the parts
        that may have retractions or later times, for those that may have rows to delete, and one for each of
        these to write. In memory are a share of `settings.compaction_memory_bytes`, some row groups, and
        eight bytes for each deleted row."""
        async with self._services.calling("aiopersist.iceberg.publish"):
            from aiopersist.iceberg.publish import publish

            services = self._services
            return await publish(services.shards, services.maintenance, _name_of(shard), as_of, keep)

    async def unpublish(self, shard: str | Table[Any, Any]) -> int:
        """End the publication of the shard or table, also of one that was dropped: delete its versions and
        all files in its folder, then the tags. Returns the number of files; 0 if it was not published.
        Repeating it after a crash finishes the work."""
        async with self._services.calling("aiopersist.iceberg.publish"):
            from aiopersist.iceberg.publish import unpublish

            return await unpublish(self._services.shards, _name_of(shard))


def _name_of(shard: str | Table[Any, Any]) -> str:
    """The name of a shard or table; `TypeError` for anything else."""
    name = shard if isinstance(shard, str) else getattr(shard, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{shown(shard)} is neither a name nor an aiopersist.Table")
    return name
