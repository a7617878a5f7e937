"""The calls of a client that keep contents of the past: tags."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from aiopersist.base.errors import shown
from aiopersist.base.frontier import Time
from aiopersist.client.services import BaseClient

if TYPE_CHECKING:
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
            return await add_tag(services.shards, services.maintenance, name_of(shard), name, as_of, expires)

    async def tags(self, shard: str | Table[Any, Any]) -> dict[str, TagView]:
        """The tags of a shard or table, by name. Linearizable: one request."""
        async with self._services.calling("aiopersist.maintenance.tags"):
            from aiopersist.maintenance.tags import tags

            return await tags(self._services.shards, name_of(shard))

    async def untag(self, shard: str | Table[Any, Any], name: str) -> None:
        """Drop the tag of that name: the next collection deletes the blobs that nothing else names, once the
        snapshots of it are closed. `UnknownTag` if there is none. One commit."""
        async with self._services.calling("aiopersist.maintenance.tags"):
            from aiopersist.maintenance.tags import drop_tag

            await drop_tag(self._services.shards, name_of(shard), name)


def name_of(shard: str | Table[Any, Any]) -> str:
    """The name of a shard or table; `TypeError` for anything else."""
    name = shard if isinstance(shard, str) else getattr(shard, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{shown(shard)} is neither a name nor an aiopersist.Table")
    return name
