"""The pins of published snapshots: each keeps the blobs that its snapshot names, whatever compaction,
collection and sweep do, until it is released. Now a pin is a leased reader with a long lease, registered
before the snapshot is read."""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiopersist.base.frontier import Antichain
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.reading import ExpireReader, RegisterReader

LEASE_S = 10 * 365 * 24 * 3600.0
_NAME = re.compile(r"iceberg-(\d+)-(\d+)")


def pin_of(label: int, snapshot_id: int) -> str:
    """The name of the pin of a snapshot."""
    return f"iceberg-{label}-{snapshot_id}"


async def hold(shard: Shard, pin: str) -> None:
    """Keep the blobs of the newest version, and of all later ones. One commit."""
    await commit(shard.register, RegisterReader(pin, Antichain(), LEASE_S))


async def release(shard: Shard, pins: Iterable[str]) -> None:
    """End these pins. A commit for each."""
    for pin in pins:
        await commit(shard.register, ExpireReader(pin))


async def held(shard: Shard) -> dict[str, tuple[int, int]]:
    """The pins of the shard: by name, label and id of the snapshot. One request."""
    readers = (await shard.open()).readers
    return {name: (int(pin[1]), int(pin[2])) for name in readers if (pin := _NAME.fullmatch(name))}
