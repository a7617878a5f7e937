"""The life of a table: created, shared by handles, read by others, left alone, dropped, closed."""

import asyncio
import random
import uuid
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import refused
from tests.table.kit import changes_of, entries, gated, in_time, sent, steps_until


class Labelled(BaseModel):
    label: str
    count: int | None


async def test_the_handle_does_no_io(quiet: ap.Client) -> None:
    """It opens at its first use; it may be awaited or entered, and is closed once."""
    before = sent(quiet)
    table = quiet.table("t", str, int)
    assert sent(quiet) == before
    assert "t" in repr(table)
    assert table.name == "t"
    assert await table is table
    async with quiet.table("t", str, int) as other:
        await other.put("a", 1)
    assert await refused(other.get("a")) is ap.UsageKind.CLOSED
    assert await refused(other.put("a", 1)) is ap.UsageKind.CLOSED
    await other.aclose()
    assert await table.get("a") == 1


async def test_it_is_made_in_any_thread_and_used_in_the_loop_of_its_client(quiet: ap.Client) -> None:
    """A plain function of a web framework may make the handle; in another loop each call is refused, closing,
    too, and here all goes on."""
    table = await asyncio.to_thread(quiet.table, "t", str, int)

    def elsewhere() -> list[Any]:
        calls = (lambda: table.put("a", 2), lambda: table.get("a"), lambda: entries(table), table.aclose)
        return [asyncio.run(refused(call())) for call in calls]

    async def unused() -> None:
        await quiet.table("t", str, int).put("a", 2)

    await table.put("a", 1)
    assert await asyncio.to_thread(elsewhere) == [ap.UsageKind.WRONG_LOOP] * 4
    assert await asyncio.to_thread(asyncio.run, refused(unused())) is ap.UsageKind.WRONG_LOOP
    assert await table.get("a") == 1


async def test_two_handles_share_one_view(quiet: ap.Client) -> None:
    """Of one client: one opening, one view, one order; the last one closes it."""
    one, two = quiet.table("t", str, int), quiet.table("t", str, int)
    await asyncio.gather(one, two)
    before = sent(quiet)
    third = quiet.table("t", str, int)
    await third.put("a", 1)
    assert (sent(quiet) - before)["consensus.compare_and_set"] <= 2  # the writer registers
    assert await two.get("a", stale=True) == 1
    await asyncio.gather(one.update("a", lambda old: old + 1), two.update("a", lambda old: old * 10))
    assert await third.get("a") == 20
    await one.aclose()
    await two.aclose()
    assert await third.get("a") == 20
    assert (await quiet.inspect("t")).readers
    await third.aclose()
    assert not (await quiet.inspect("t")).readers
    assert await quiet.table("t", str, int).get("a") == 20


async def test_closed_while_it_opens(place: Place) -> None:
    """The opening that is under way ends, and leaves nothing behind."""
    async with gated(place.urls) as (client, gate):
        await (await place.client()).table("t", str, int).put("a", 1)
        table = client.table("t", str, int)
        gate.hold("head", "scan")
        opening = asyncio.ensure_future(table.get("a"))
        await in_time(gate.held.wait())
        closing = asyncio.create_task(table.aclose())
        await asyncio.sleep(0.01)
        gate.open()
        await in_time(closing)
        await asyncio.wait([opening])
        assert not client._services.tables._open
        assert await client.table("t", str, int).get("a") == 1


async def test_an_opening_that_is_cancelled_or_fails(place: Place) -> None:
    """One call that is cut off as it opens the table leaves it to the others; a failure is tried again."""
    async with gated(place.urls) as (client, gate):
        table = client.table("t", str, int)
        gate.hold("compare_and_set")
        first, second = asyncio.create_task(table.put("a", 1)), asyncio.create_task(table.put("b", 1))
        await in_time(gate.held.wait())
        first.cancel()
        await asyncio.wait([first])
        gate.open()
        await in_time(second)
        assert await entries(table) == [("b", 1)]
    readonly = ap.open(**place.urls._asdict(), readonly=True, maintenance=False)
    async with readonly as reader:
        later = reader.table("later", str, int)
        with pytest.raises(ap.UnknownShard):
            await later.get("a")
        await (await place.client()).table("later", str, int).put("a", 1)
        assert await later.get("a") == 1


async def test_calls_end_as_it_closes(place: Place) -> None:
    """Calls that wait end with CLOSED, the client's end included; what was sent may have happened."""
    async with gated(place.urls) as (client, gate):
        table = client.table("t", str, int)
        await table.put("a", 1)
        gate.hold("compare_and_set", "head", late=True)
        calls = [
            asyncio.create_task(c)
            for c in (table.put("a", 2), table.put("b", 2), table.get("a"), table.insert("a", 1))
        ]
        await in_time(gate.held.wait())
        closing = asyncio.create_task(table.aclose())
        await asyncio.wait(calls)
        for call in calls:
            error = call.exception()
            assert isinstance(error, ap.InvalidUsage), error
            assert error.kind is ap.UsageKind.CLOSED
        gate.open()
        await in_time(closing)
        again = client.table("t", str, int)
        assert await in_time(again.get("a")) in (1, 2)
        await again.put("c", 3)
        assert await again.get("c") == 3


async def test_not_a_table(location: Any) -> None:
    """A shard is no table, and a table takes no writer; readers and listens read it as any shard."""
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        async with client.writer("plain", SCHEMA) as writer:
            await writer.write([("a", 1)])
        async with client.writer("wall", SCHEMA, clock="wall") as writer:
            await writer.write([("a", 1)])
        for name in ("plain", "wall"):
            table = client.table(name, str, int)
            for call in (table.get("a"), table.put("a", 1), table.count(), table.view()):
                assert await refused(call) is ap.UsageKind.NOT_A_TABLE
        table = client.table("t", str, int)
        await table.put("a", 1)

        async def write(**given: Any) -> None:
            async with client.writer("t", table.schema, **given) as writer:
                await writer.write([("a", 2)])

        assert await refused(write()) is ap.UsageKind.NOT_A_TABLE
        assert await refused(write(clock="wall")) is ap.UsageKind.NOT_A_TABLE
        async with client.reader("t", table.schema) as reader, reader.snapshot() as snapshot:
            assert await snapshot.rows() == [("a", 1, 1)]
        assert await table.get("a") == 1


async def test_readonly_clients(place: Place) -> None:
    """They read, follow and feed, never write, and create nothing."""
    writing = await place.client()
    table = writing.table("t", str, int)
    async with ap.open(**place.urls._asdict(), readonly=True, maintenance=False) as client:
        assert [await _error(client.table("no", str, int).get("a"))] == [ap.UnknownShard]
        await table
        reading = client.table("t", str, int)
        assert await reading.get("a") is None
        assert await reading.count() == 0
        time = await table.put("a", 1)
        assert await reading.get("a") == 1
        await table.put("a", 2)
        assert await entries(reading) == [("a", 2)]
        assert await reading.get("a", as_of=time) == 1
        async with reading.changes() as feed:
            assert [c.new for c in (await anext(feed)).changes] == [2]
            await table.put("a", 3)
            assert [(c.old, c.new) for c in (await in_time(anext(feed))).changes] == [(2, 3)]
        for write in (
            reading.put("a", 1),
            reading.put_many({"a": 1}),
            reading.insert("b", 1),
            reading.delete("a"),
            reading.update("a", lambda old: 1),
            client.transact(lambda tx: pytest.fail("it ran")),
        ):
            assert await _error(write) is ap.Unsupported
    assert await table.get("a") == 3


async def _error(work: Any) -> type[BaseException]:
    with pytest.raises(ap.Error) as caught:
        await work
    return type(caught.value)


async def test_a_readonly_view_whose_history_is_gone(place: Place) -> None:
    """It holds nothing back. What it missed was compacted: it begins anew."""
    writing = await place.client()
    table = writing.table("t", int, int)
    await table.put_many((i, 0) for i in range(20))
    async with ap.open(
        **place.urls._asdict(), readonly=True, maintenance=False, settings=ap.Settings(watch_timeout_s=1000.0)
    ) as client:
        reading = client.table("t", int, int)
        assert await reading.count() == 20
        for number in range(1, 5):
            await table.put_many((i, number) for i in range(0, 20, number))
        await table.delete(0)
        await writing.retain("t", 0)
        await writing.force_compaction("t")
        await writing.force_gc("t")
        expected = dict(await entries(table))
        assert await reading.get_many(range(20)) == expected


async def test_dropped_tables(place: Place) -> None:
    """Calls on a table that was dropped, here or elsewhere, say so; the name is free for another one."""
    one, two = await place.client(), await place.client()
    table, theirs = one.table("t", str, int), two.table("t", str, int)
    await table.put("a", 1)
    await theirs.get("a")
    async with theirs.changes() as feed:
        await anext(feed)
        await one.drop("t")
        with pytest.raises(ap.ShardFinalized):
            await in_time(anext(feed))
    for handle in (table, theirs):
        for call in (
            handle.get("a"),
            handle.put("a", 2),
            handle.put("a", 1),
            handle.count(),
            handle.delete("b"),
        ):
            assert await _error(in_time(call)) is ap.ShardFinalized
    fresh = two.table("t", str, str)
    await fresh.put("a", "x")
    assert await one.table("t", str, str).get("a") == "x"


async def test_a_view_whose_lease_was_lost(place: Place) -> None:
    """A long pause: the lease runs out, others write, compact and collect. It goes on, with all of it."""
    limits = {"reader_lease_s": 10.0, "writer_lease_s": 10.0, "inline_writes_single_max_bytes": 0}
    one, two = await place.client(**limits), await place.client(**limits)
    table, theirs = one.table("t", int, str), two.table("t", int, str)
    await table.put_many((i, "old") for i in range(50))
    await theirs.count()
    for pause in range(1, 4):
        place.clock.ahead_s += 1000.0
        await theirs.put_many((i, f"new{pause}") for i in range(0, 50, pause))
        await theirs.delete(pause)
        await two.retain("t", 0)
        for _ in range(2):
            await two.force_compaction("t")
            await two.force_gc("t")
        expected = dict(await entries(theirs))
        if pause != 2:
            assert await in_time(table.get_many(range(50))) == expected
        assert await in_time(table.update(49, lambda old: f"{old}+")) == f"{expected[49]}+"
        assert dict(await entries(theirs)) == {**expected, 49: f"{expected[49]}+"}
        assert await table.get_many(range(50), stale=True) == dict(await entries(theirs))
    report = await two.fsck("t")
    assert report.ok, report.problems


async def test_compaction_and_collection_beside_it(place: Place) -> None:
    """Random puts of two clients while everything is compacted and collected: the views agree with the
    shard, which has one row per key."""
    rng = random.Random(3)
    limits = {"inline_writes_single_max_bytes": 0, "row_group_bytes": 200, "blob_target_size": 400}
    clients = [await place.client(**limits) for _ in range(2)]
    tables = [client.table("t", int, str) for client in clients]
    model: dict[int, str] = {}
    await clients[0].table("t", int, str)
    await clients[0].retain("t", 0)
    for turn in range(60):
        table = rng.choice(tables)
        keys = rng.sample(range(12), 3)
        if rng.random() < 0.3:
            await table.delete(*keys)
            for key in keys:
                model.pop(key, None)
        else:
            await table.put_many(dict.fromkeys(keys, f"{turn}" * 5))
            model.update(dict.fromkeys(keys, f"{turn}" * 5))
        if turn % 7 == 0:
            await rng.choice(clients).force_compaction("t")
            await rng.choice(clients).force_gc("t")
        if turn % 5 == 0:
            for reader in tables:
                assert await reader.get_many(range(12)) == model
    assert await entries(tables[0]) == sorted(model.items())
    async with clients[0].reader("t", tables[0].schema) as reader, reader.snapshot() as snapshot:
        assert [diff for _, _, diff in await snapshot.rows()] == [1] * len(model)


async def test_it_keeps_a_day(place: Place) -> None:
    """`retain` is 24 hours until told otherwise: a time of the last day can be read, one before cannot."""
    client = await place.client(reader_lease_s=1e6, writer_lease_s=1e6)
    table = client.table("t", str, int)
    early = await table.put("a", 1)
    place.clock.ahead_s = 23 * 3600.0
    await table.put("a", 2)
    await table.aclose()  # what it holds is told by its heartbeats
    await client.admin.force_compaction("t")
    table = client.table("t", str, int)
    assert await table.get("a", as_of=early) == 1
    place.clock.ahead_s = 25 * 3600.0
    late = await table.put("a", 3)
    await table.aclose()
    await client.admin.force_compaction("t")
    table = client.table("t", str, int)
    with pytest.raises(ap.SinceViolation):
        await table.get("a", as_of=early)
    assert await table.get("a", as_of=late) == 3
    await client.admin.retain("t", timedelta(seconds=1))
    assert await table.get("a") == 3


async def test_a_clock_that_was_set_back(place: Place) -> None:
    """By more than `clock_ahead_max_s`: times go on from the upper, and nothing is refused."""
    place.clock.ahead_s = 3 * 3600.0
    client = await place.client()
    table = client.table("t", str, int)
    first = await table.put("a", 1)
    place.clock.ahead_s = 0.0
    for opened in (client, await place.client()):
        again = opened.table("t", str, int)
        assert await in_time(again.put("a", len(str(opened)))) > first
        assert await again.get("a") == len(str(opened))


async def test_two_tables_of_one_name_elsewhere() -> None:
    """Two locations have nothing in common."""
    async with ap.open(f"mem://{uuid.uuid4().hex}") as one, ap.open(f"mem://{uuid.uuid4().hex}") as two:
        await one.table("t", str, int).put("a", 1)
        assert await two.table("t", str, int).get("a") is None


async def test_the_view_is_told(place: Place) -> None:
    """How many keys and bytes this process holds, and up to when."""
    client, other = await place.client(), await place.client()
    table, theirs = client.table("t", str, str), other.table("t", str, str)
    last = 0
    for number in range(20):
        last = await (table, theirs)[number % 2].put(f"k{number % 7}", "x" * number)
    await theirs.delete("k1")
    await table.get("k1")
    view, second = await table.view(), await other.table("t", str, str).view()
    assert view.resident
    assert view.keys == 6
    assert view.bytes == second.bytes
    fresh = await (await place.client()).table("t", str, str).view()
    assert (fresh.keys, fresh.bytes, fresh.upper) == (view.keys, view.bytes, view.upper)
    assert view.upper > ap.Antichain(last)


@pytest.mark.parametrize("history", ["none", "kept", "compacted"])
async def test_a_view_opens_with_what_is_there(history: str, place: Place) -> None:
    """Many entries, some of them with vals before, some deleted, and texts that JSON escapes: an opened view
    has what the view has through which they came."""
    client = await place.client()
    table = client.table("t", str, Labelled)
    model = {f"k{n}": Labelled(label=str(n) + '"é' * (n % 11), count=n or None) for n in range(9000)}
    await table.put_many(model)
    if history != "none":
        changed = {f"k{n}": Labelled(label="new", count=n) for n in range(0, 9000, 7)}
        await table.put_many(changed)
        await table.delete(*(f"k{n}" for n in range(0, 9000, 5)))
        model = {key: val for key, val in (model | changed).items() if int(key[1:]) % 5}
    if history == "compacted":
        await client.admin.force_compaction("t")
    theirs = (await place.client()).table("t", str, Labelled)
    assert await theirs.view() == await table.view()
    assert await theirs.get_many([f"k{n}" for n in range(9001)]) == model


async def test_a_feed_of_another_process_sees_what_a_group_wrote(location: Any) -> None:
    """Puts of many tasks, followed from another client: the feed ends where the table ends."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as one,
        ap.open(blob=location.blob, consensus=location.consensus) as two,
    ):
        table = one.table("t", str, int)
        await table.put("k", -1)
        async with two.table("t", str, int).changes() as feed:
            puts = asyncio.gather(*(table.update("k", lambda old: old + 1) for _ in range(50)))
            steps = await steps_until(feed, lambda found: bool(found) and changes_of(found)[-1].new == 49)
            await puts
        changes = changes_of(steps)
        assert all(change.old == before.new for before, change in pairwise(changes))
