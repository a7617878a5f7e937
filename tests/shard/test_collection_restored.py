"""Goal: a process that remembers what versions dropped deletes nothing that a store which was restored under
it names; and where it has followed all versions, it reads none of them again."""

from typing import Any

import pytest

import aiopersist as ap
from aiopersist.gc.collect import collect
from aiopersist.maintenance.shard import ShardMaintenance
from tests.shard.register_kit import Place
from tests.shard.test_register import restore, saved, shard_of
from tests.support.schemas import SCHEMA

BLOBS = {"maintenance": False, "inline_writes_single_max_bytes": 0}


async def append(w: ap.WriteHandle[Any, Any], count: int) -> None:
    for at in range(w.upper.time, w.upper.time + count):
        await w.compare_and_append([(f"{at}", at, at, 1)], at, at + 1)


async def compacted_and_rolled_up(client: ap.Client) -> Any:
    """Its shard, with parts that versions dropped and a newer rollup."""
    await client.admin.force_compaction("t")
    shard = shard_of(client)
    await ShardMaintenance(shard).roll_up()
    return shard


@pytest.mark.parametrize("method", ["scan", "head"])
async def test_a_store_that_goes_back_before_a_collection_knows_its_head(place: Place, method: str) -> None:
    """Goal: an outage may lie between two requests, and what was in the store before it is there again."""
    async with place.open(**BLOBS) as client, client.writer("t", SCHEMA) as w:
        await append(w, 6)
        backup = saved(place)
        await append(w, 3)
        shard = await compacted_and_rolled_up(client)
        there = set(await place.keys(".parquet"))
        original = getattr(place.consensus, method)

        async def restored(*args: Any) -> Any:
            setattr(place.consensus, method, original)
            restore(place, backup)
            return await original(*args)

        setattr(place.consensus, method, restored)
        with pytest.raises(ap.Corruption, match="restored"):
            await collect(shard)
        assert set(await place.keys(".parquet")) == there


@pytest.mark.parametrize(("later", "reads"), [(False, (1, 0)), (True, (2, 1))])
async def test_what_was_followed_is_not_read_again(place: Place, later: bool, reads: tuple[int, int]) -> None:
    """Goal: one request for the earliest version; a process that came later also reads the versions and the
    rollup before them. Both delete the same."""
    async with place.open(**BLOBS) as client, client.writer("t", SCHEMA) as w:
        await append(w, 1)
        await collect(await compacted_and_rolled_up(client))  # so that the versions begin with a rollup
        await append(w, 6)
        shard = await compacted_and_rolled_up(client)
        async with place.open(**BLOBS) as other, other.reader("t", SCHEMA):
            place.faults.calls.clear()
            collected = await collect(shard_of(other) if later else shard)
            calls = place.faults.calls
            assert (calls["scan"], calls["get"]) == reads, calls
        assert collected.parts == 7
        named = {part.key for part in shard.state.parts}
        assert set(await place.keys(".parquet")) == named
