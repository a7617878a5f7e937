"""What keeps the blobs of published snapshots, whatever compaction, collection and sweep do: a tag for each,
whose name has the label and the id of the snapshot."""

import re
from collections.abc import Iterable
from contextlib import suppress

from aiopersist.base.errors import UnknownTag
from aiopersist.base.frontier import Time
from aiopersist.maintenance.background import Maintenance
from aiopersist.maintenance.tags import add_tag
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.tagging import DropTag

_NAME = re.compile(r"iceberg-(\d+)-(\d+)")


def pin_of(label: int, snapshot_id: int) -> str:
    """The name of the tag of a snapshot."""
    return f"iceberg-{label}-{snapshot_id}"


async def hold(shards: Shards, maintenance: Maintenance, shard: Shard, pin: str, as_of: Time) -> None:
    """Keep the contents at `as_of`, as the newest version has them. Errors as of `Client.tag`."""
    await add_tag(shards, maintenance, shard.id, pin, as_of, None)


async def release(shard: Shard, pins: Iterable[str]) -> None:
    """Drop these tags, as far as they are there. A commit for each."""
    for pin in pins:
        with suppress(UnknownTag):
            await commit(shard.register, DropTag(pin))


async def held(shard: Shard) -> dict[str, tuple[int, int]]:
    """The tags of published snapshots: by name, label and id of the snapshot. One request."""
    tags = (await shard.open()).tags
    return {name: (int(pin[1]), int(pin[2])) for name in tags if (pin := _NAME.fullmatch(name))}
