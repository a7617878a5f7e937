"""Goal: a hold keeps the history that it names, and no version and no replaced blob: open snapshots and
listens keep those, for as long as they are open."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from tests.support.internals import shard_of
from tests.support.processes import Place
from tests.support.schemas import SCHEMA

SETTINGS = {"inline_writes_single_max_bytes": 0, "reader_lease_s": 900.0, "blob_cache_bytes": 0}
DAY_S = 24 * 3600.0
ROUNDS = 20
HOLDS: dict[str, dict[str, Any]] = {"named": {"hold_name": "nightly"}, "without a name": {}}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    """With a shard that has the times 0 to 3."""
    async with AsyncExitStack() as stack:
        place = Place(stack, SETTINGS)
        async with (await place.client()).writer("s", SCHEMA) as writer:
            await writer.compare_and_append([("k", t, t, 1) for t in range(4)], 0, 4)
        yield place


async def rewritten(client: ap.Client, first: int = 4) -> None:
    """Appended to and compacted, again and again, from time `first` on."""
    async with client.writer("s", SCHEMA) as writer:
        for t in range(first, first + ROUNDS):
            await writer.compare_and_append([("k", t, t, 1)], t, t + 1)
            await client.admin.force_compaction("s")


async def kept(place: Place, client: ap.Client) -> tuple[int, int]:
    """The versions and the parts that a collection leaves."""
    await client.admin.force_gc("s")
    shard = await client.shard_id("s")
    return len(await place.clock.scan(consensus_key(shard), 0, 10_000)), len(await place.parts())


@pytest.mark.parametrize("options", HOLDS.values(), ids=HOLDS.keys())
async def test_a_process_that_is_gone_leaves_history_and_no_versions(
    place: Place, options: dict[str, Any]
) -> None:
    """Goal: its hold has a lease of a day; what it had open ends with the lease of readers."""
    gone, other = await place.client(), await place.client()
    held = await gone.reader("s", SCHEMA, hold=2, lease_s=DAY_S, **options)
    await rewritten(other)
    place.clock.ahead_s += SETTINGS["reader_lease_s"] + 1  # no heartbeat comes
    versions, parts = await kept(place, other)
    assert parts == 1
    assert versions < 8
    assert held.reader_id in shard_of(await other.reader("s", SCHEMA)).state.readers


@pytest.mark.parametrize("options", HOLDS.values(), ids=HOLDS.keys())
async def test_a_process_that_lives_holds_versions_by_what_it_has_open(
    place: Place, options: dict[str, Any]
) -> None:
    """Goal: a snapshot is read to its end; blobs that were replaced meanwhile go once it is closed, even if
    the hold itself sends few heartbeats."""
    mine, other = await place.client(), await place.client()
    held = await mine.reader("s", SCHEMA, hold=2, lease_s=DAY_S, **options)
    async with held.snapshot(3) as snapshot:
        await rewritten(other)
        place.clock.ahead_s += SETTINGS["reader_lease_s"] + 1
        await mine.reader("s", SCHEMA)  # renews the lease of what is open
        assert (await kept(place, other))[0] > ROUNDS
        assert await snapshot.rows() == [("k", t, 1) for t in range(4)]
    place.clock.ahead_s += SETTINGS["reader_lease_s"] + 1
    await mine.reader("s", SCHEMA)
    versions, parts = await kept(place, other)
    assert parts == 1
    assert versions < 8


async def test_who_takes_a_named_hold_over_reads_what_it_holds(place: Place) -> None:
    """Goal: all promised history is there, and is kept while it is read, beside any collection."""
    gone, other = await place.client(), await place.client()
    await gone.reader("s", SCHEMA, hold=2, hold_name="nightly", lease_s=DAY_S)
    mover = await other.reader("s", SCHEMA, hold=0)
    await mover.downgrade_since(4)
    await rewritten(other)
    place.clock.ahead_s += SETTINGS["reader_lease_s"] + 1
    await kept(place, other)
    again = await (await place.client()).reader("s", SCHEMA, hold_name="nightly", lease_s=DAY_S)
    assert again.since == ap.Antichain(2)
    async with again.snapshot(2) as snapshot, again.listen(as_of=2) as changes:
        await rewritten(other, 4 + ROUNDS)
        await kept(place, other)
        assert await snapshot.rows() == [("k", t, 1) for t in range(3)]
        step = await anext(changes.steps())
        assert [(row.val, row.time) for row in step.updates][:2] == [(3, 3), (4, 4)]
