"""What is told of subscriptions, and that the state keeps them wherever it goes."""

from collections.abc import Sequence

import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryConsensus
from tests.subscription.kit import SMALL, acked, in_time, rows, steps_until, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA


async def test_lag_and_what_is_held(place: Place) -> None:
    """In times, in updates by the descriptions of batches, in bytes of parts; within the contents all."""
    client = await place.client(**SMALL)
    for number in range(10):
        await write(client, *((f"k{key}", number) for key in range(5)))
    for name, start in (("now", "now"), ("at", 5), ("all", None)):
        await (await client.subscription("s", name=name, start=start)).aclose()
    views = await client.admin.subscriptions("s")
    assert {name: (view.position.time, view.contents) for name, view in views.items()} == {
        "now": (10, False),
        "at": (6, False),
        "all": (9, True),
    }
    assert {name: (view.lag, view.lag_updates) for name, view in views.items()} == {
        "now": (0, 0),
        "at": (4, 20),
        "all": (1, 50),
    }
    assert views["now"].held_bytes == 0 < views["at"].held_bytes < views["all"].held_bytes
    assert views["all"].held_bytes == (await client.admin.inspect("s")).blob_bytes
    assert all(view.last_ack is None and not view.expired for view in views.values())
    inspected = await client.admin.inspect("s")
    assert inspected.subscriptions == views
    holds = {hold.id: hold.since for hold in inspected.holds if hold.kind == "subscription"}
    assert holds == {"now": ap.Antichain(9), "at": ap.Antichain(5), "all": ap.Antichain(9)}
    assert inspected.model_validate_json(inspected.model_dump_json()).subscriptions == views


async def test_a_rollup_has_them(place: Place) -> None:
    """Older versions are deleted, and a process that opens the shard anew finds each position; fsck and sweep
    find nothing wrong."""
    client = await place.client(**SMALL)
    await write(client, *((f"k{number}", number) for number in range(60)))
    async with client.subscription("s", name="sub") as sub:
        step = await in_time(anext(sub))
        await sub.ack(step)
    await (await client.subscription("s", name="half", share=(1, 2))).aclose()
    await client.admin.retain("s", 0)
    for number in range(5):
        await write(client, ("new", number))
        await client.admin.force_compaction("s")
        await client.admin.force_gc("s")
    other = await place.client(**SMALL)
    assert (await other.inspect("s")).earliest_seqno > 0
    assert await other.subscriptions("s") == await client.admin.subscriptions("s")
    assert (await other.fsck("s")).ok
    assert not (await other.sweep_leaked_blobs()).keys
    async with other.subscription("s", SCHEMA, name="sub") as sub:
        steps = await steps_until(sub, lambda found: found[-1:] != [] and found[-1].upper == ap.Antichain(6))
        found = [update.val for step in [step, *steps] for update in step.updates if update.key != "new"]
        assert sorted(found) == list(range(60))
        assert [u.val for step in steps for u in step.updates if u.key == "new"] == list(range(5))


async def test_a_dropped_shard_ends_them(place: Place) -> None:
    """The name is free for a shard without subscriptions."""
    client = await place.client()
    await write(client, ("a", 1))
    await (await client.subscription("s", name="sub")).aclose()
    await client.admin.drop("s")
    with pytest.raises(ap.UnknownShard):
        await client.admin.subscriptions("s")
    await write(client, ("a", 2))
    assert await client.admin.subscriptions("s") == {}


class OneAtATime(MemoryConsensus):
    """A store that writes one shard at a time."""

    async def compare_and_set_many(self, entries: Sequence[ap.Entry]) -> bool:
        if len(entries) > 1:
            raise ap.Unsupported("one at a time")
        return await super().compare_and_set_many(entries)


async def test_a_store_that_writes_one_shard_at_a_time() -> None:
    """A commit into another shard is refused before anything is sent; into the same shard it works."""
    consensus = OneAtATime("one-at-a-time")
    async with ap.open(blob="mem://one-at-a-time", consensus=consensus, maintenance=False) as client:
        await write(client, ("a", 1))
        async with (
            client.writer("s", SCHEMA) as same,
            client.writer("out", SCHEMA) as out,
            client.subscription("s", SCHEMA, name="sub") as sub,
        ):
            step = await in_time(anext(sub))
            with pytest.raises(ap.Unsupported):
                await sub.commit(step, [ap.Append(out, [("x", 1, 0, 1)], 0, 1)])
            assert (await client.upper("out")).time == 0
            await sub.commit(step, [ap.Append(same, [("x", 1, 1, 1)], 1, 2)])
            assert await acked(sub, 1) == [("x", 1)]


async def test_cursors_of_a_restored_store(place: Place) -> None:
    """A cursor of a version that is not there is told; nothing is opened by it."""
    client = await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub", start="now") as sub:
        await write(client, ("a", 2))
        step = await in_time(anext(sub))
        await client.admin.drop("s")
        assert step.cursor
    await write(client, ("a", 1))
    with pytest.raises(ap.InvalidUsage) as caught:
        await client.subscription("s", name="sub", resume=step.cursor)
    assert caught.value.kind is ap.UsageKind.INVALID_CURSOR
    async with client.subscription("s", name="sub") as sub:
        assert await rows(sub, 1) == [("a", 1)]
