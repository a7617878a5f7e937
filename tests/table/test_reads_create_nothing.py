"""Goal: a read of a table that was not made yet finds it empty, and makes none, so that a misspelt name
leaves nothing behind; what is made later is seen by the next read; and times that are no plausible instant
are refused, where they would give nothing."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.compute as pc
import pytest

import aiopersist as ap
from aiopersist.testing.faults import FaultyConsensus
from tests.support.processes import Place
from tests.table.kit import Gate, entries, gated, in_time, sent, table

READS: dict[str, tuple[Any, Any]] = {
    "get": (lambda t: t.get("k"), None),
    "get, stale": (lambda t: t.get("k", stale=True), None),
    "get, as of": (lambda t: t.get("k", as_of=datetime.now(UTC) - timedelta(days=1)), None),
    "get, as of an int": (lambda t: t.get("k", as_of=5), None),
    "get_many": (lambda t: t.get_many(["k", "l"]), {}),
    "items": (entries, []),
    "items, filtered": (lambda t: entries(t, prefix="k", where=pc.field("val") > 0), []),
    "count": (lambda t: t.count(start="a"), 0),
    "view": (lambda t: t.view(), (True, 0, 0, ap.Antichain(0))),
}


@pytest.mark.parametrize("read", READS)
async def test_a_read_makes_no_table(read: str, quiet_mem: ap.Client) -> None:
    call, nothing = READS[read]
    misspelt = table(quiet_mem, "stok")
    assert await in_time(call(misspelt)) == nothing
    assert await in_time(call(misspelt)) == nothing
    assert await quiet_mem.list_shards() == {}
    assert await quiet_mem._stack.consensus.list_keys("") == ["location/id"]
    await misspelt.put("k", 1)
    assert await misspelt.get("k") == 1
    assert await in_time(call(misspelt)) != nothing or read.startswith("get, as of")


async def test_columns_of_a_table_that_was_not_made(quiet_mem: ap.Client) -> None:
    misspelt = table(quiet_mem, "stok")
    assert (await misspelt.to_arrow()).column_names == ["key", "val"]
    assert (await misspelt.to_arrow(columns=["key"])).num_rows == 0
    assert (await misspelt.to_polars()).columns == ["key", "val"]
    assert list((await misspelt.to_pandas()).columns) == ["key", "val"]
    with pytest.raises(ap.InvalidUsage) as refused:
        await misspelt.to_arrow(columns=["nothing"])
    assert refused.value.kind == ap.UsageKind.INVALID_COLUMN
    assert await quiet_mem.list_shards() == {}


async def test_what_another_client_makes_is_seen(place: Place) -> None:
    one, two = table(await place.client()), table(await place.client())
    assert await one.get("k") is None
    await two.put("k", 1)
    assert await one.get("k") == 1
    await one.put("k", 2)
    assert await two.get("k") == 2


async def test_a_look_that_was_sent_serves_no_later_read(place: Place) -> None:
    """Goal: linearizable also where there is nothing: a read that begins behind a put sees it, though an
    earlier read is under way which found no table."""
    async with gated(place.urls) as (client, gate):
        read, other = table(client), table(await place.client())
        gate.hold("likely_head", "head", late=True)
        early = asyncio.create_task(read.get("k"))
        await in_time(gate.held.wait())
        await asyncio.sleep(0.01)  # it has read
        await other.put("k", 1)
        late = [asyncio.create_task(t.get("k")) for t in (read, table(client))]
        await asyncio.sleep(0.01)
        gate.open()
        assert await in_time(early) in (None, 1)
        assert await in_time(asyncio.gather(*late)) == [1, 1]


async def test_a_put_beside_a_read_makes_it(place: Place) -> None:
    """Goal: a change that comes while a read looks for the table is not refused with it."""
    async with gated(place.urls) as (client, gate):
        of_reads, of_puts = table(client), table(client)
        gate.hold("likely_head", "head", late=True)
        read = asyncio.create_task(of_reads.get("k"))
        await in_time(gate.held.wait())
        puts = [asyncio.create_task(t.put(name, 1)) for t, name in ((of_reads, "k"), (of_puts, "l"))]
        await asyncio.sleep(0.01)
        gate.open()
        await in_time(asyncio.gather(read, *puts))
        assert await entries(of_reads) == [("k", 1), ("l", 1)]
    assert await entries(table(await place.client())) == [("k", 1), ("l", 1)]


async def test_an_instant_of_the_future_is_waited_for(quiet_mem: ap.Client) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=0.2)
    misspelt = table(quiet_mem, "stok")
    assert await in_time(misspelt.get("k", as_of=soon)) is None
    assert quiet_mem.clock()[0] >= soon.timestamp()
    assert await quiet_mem.list_shards() == {}
    later = await misspelt.put("k", 1)
    assert later > soon.timestamp() * 1e6


async def test_what_needs_a_place_in_it_makes_it(quiet_mem: ap.Client) -> None:
    """Goal: an opening by hand, a feed, whose cursors name the table, and a subscription, whose position lies
    in it, are no reads of what is there."""
    for name in ("opened", "fed", "subscribed"):
        t = table(quiet_mem, name)
        assert await t.get("k") is None
        if name == "opened":
            async with t:
                pass
        elif name == "fed":
            async with t.changes():
                pass
        else:
            async with t.subscription("s"):
                pass
        assert name in await quiet_mem.list_shards()


async def test_a_dropped_table_is_empty_again(quiet_mem: ap.Client) -> None:
    await table(quiet_mem).put("k", 1)
    await quiet_mem.drop("t")
    assert await table(quiet_mem).get("k") is None
    assert await quiet_mem.list_shards() == {}


async def test_a_readonly_client_says_that_it_is_not_there(place: Place) -> None:
    """Goal: as before: such a client is for what others make."""
    await (await place.client()).writer("other", ap.Schema(str, int))
    async with ap.open(blob=place.urls.blob, consensus=place.urls.consensus, readonly=True) as reader:
        with pytest.raises(ap.UnknownShard):
            await table(reader, "stok").get("k")


UNITS = {"seconds": 1, "milliseconds": 1_000, "nanoseconds": 1_000_000_000}


@pytest.mark.parametrize("made", [True, False], ids=["made", "not made"])
@pytest.mark.parametrize("unit", UNITS)
async def test_an_instant_in_another_unit_is_refused(unit: str, made: bool, quiet_mem: ap.Client) -> None:
    t = table(quiet_mem)
    if made:
        await t.put("k", 1)
    now = int(time.time())
    wrong = now * UNITS[unit]
    said = datetime.fromtimestamp(now, UTC).isoformat()
    calls = [lambda: t.get("k", as_of=wrong), lambda: t.count(as_of=wrong)]
    if made:
        calls.append(lambda: t.changes(as_of=wrong).__aenter__())
        calls.append(lambda: t.subscription("s", start=wrong).__aenter__())
        reader = await quiet_mem.reader("t")
        calls += [lambda: reader.snapshot(wrong).__aenter__(), lambda: reader.listen(wrong).__aenter__()]
        calls += [
            lambda: reader.listen(until=wrong).__aenter__(),
            lambda: reader.subscribe(wrong).__aenter__(),
        ]
        calls.append(lambda: quiet_mem.shared_read("t", wrong).__aenter__())
    for call in calls:
        with pytest.raises(ap.InvalidUsage, match="times count microseconds") as refused:
            await in_time(call())
        assert refused.value.kind == ap.UsageKind.INVALID_TIME
        assert refused.value.time == wrong
        assert f"datetime.fromisoformat('{said}')" in str(refused.value)


async def test_times_of_ones_own_are_taken(quiet_mem: ap.Client) -> None:
    """Goal: the least time, an instant of 1970 as a datetime, and any time of a shard whose times are not
    instants: such are written by appends that say them."""
    t = table(quiet_mem)
    await t.put("k", 1)
    assert await t.get("k", as_of=0) is None
    assert await t.get("k", as_of=datetime.fromtimestamp(1795836400 / 1e6, UTC)) is None
    seconds = 1_795_836_400
    async with quiet_mem.writer("own", ap.Schema(str, int), clock="wall") as writer:
        await writer.compare_and_append([("k", 1, seconds, 1)], 0, seconds + 1)
        async with quiet_mem.reader("own") as reader, reader.snapshot(seconds) as found:
            assert [row[:2] for row in await found.rows()] == [("k", 1)]


async def test_reads_at_once_look_together(quiet_mem: ap.Client) -> None:
    """Goal: many reads of a table that was not made share a look, or the next one."""
    misspelt = table(quiet_mem, "stok")
    await misspelt.get("k")
    before = sent(quiet_mem)
    assert await in_time(asyncio.gather(*(misspelt.get("k") for _ in range(50)))) == [None] * 50
    once = sent(quiet_mem) - before
    before = sent(quiet_mem)
    await misspelt.get("k")
    alone = sent(quiet_mem) - before
    assert alone and all(once[op] <= 2 * count for op, count in alone.items())


async def test_an_instant_that_passes_during_the_look(place: Place) -> None:
    """Goal: what was put before the instant, and behind the look, is found."""
    gate = Gate()
    client = await place._opened(FaultyConsensus(place.clock, gate), {})
    other = table(await place.client())
    at = datetime.now(UTC) + timedelta(seconds=30)
    gate.hold("likely_head", "head", late=True)
    read = asyncio.create_task(table(client).get("k", as_of=at))
    await in_time(gate.held.wait())
    await asyncio.sleep(0.01)  # it has read
    assert await other.put("k", 1) < at.timestamp() * 1e6
    place.clock.ahead_s = 60
    gate.open()
    assert await in_time(read) == 1
