"""What keeps the blobs of published snapshots, whatever compaction, collection and sweep do: a tag for each,
whose name has the folder of the table, the label and the id of the snapshot."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from aiopersist.base.errors import UnknownTag
from aiopersist.base.frontier import Time
from aiopersist.maintenance.background import Maintenance
from aiopersist.maintenance.tags import add_tag
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.tagging import DropTag


class Pins(NamedTuple):
    """The tags of the snapshots of a table. A shard that is published by its name and by its id has two."""

    shard: Shard
    folder: str
    """The name of the folder of the table."""

    def name(self, label: int, snapshot_id: int) -> str:
        """The name of the tag of a snapshot."""
        return f"iceberg-{self.folder}-{label}-{snapshot_id}"

    async def hold(self, shards: Shards, maintenance: Maintenance, name: str, as_of: Time) -> None:
        """Add a tag of the contents at `as_of`, as the newest version has them. Errors as of `Client.tag`."""
        await add_tag(shards, maintenance, self.shard.id, name, as_of, None)

    async def release(self, names: Iterable[str]) -> None:
        """Drop these tags, as far as they are there. A commit for each."""
        for name in names:
            with suppress(UnknownTag):
                await commit(self.shard.register, DropTag(name))

    async def held(self) -> dict[str, tuple[int, int]]:
        """The tags by name: label and id of the snapshot. One request."""
        tags = (await self.shard.open()).tags
        form = re.compile(rf"iceberg-{re.escape(self.folder)}-(\d+)-(\d+)")
        matches = ((name, form.fullmatch(name)) for name in tags)
        return {name: (int(match[1]), int(match[2])) for name, match in matches if match}
