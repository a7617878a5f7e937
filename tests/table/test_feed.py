"""Feeds: the contents in steps, then each change once, in any process and after any break."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

import aiopersist as ap
from tests.support.cancelling import cancelled_after
from tests.support.processes import Place
from tests.support.shards import refused
from tests.table.kit import changes_of, gated, in_time, steps_until

SMALL = {"row_group_bytes": 400, "inline_writes_single_max_bytes": 0, "blob_target_size": 800}


async def enter(opening: Any) -> None:
    async with opening:
        pass


async def contents_of(feed: Any) -> list[Any]:
    """The steps of the contents; it reads no further."""
    steps = await steps_until(
        feed, lambda found: bool(found) and found[-1].upper > ap.Antichain(found[0].changes[0].time)
    )
    assert all(step.contents for step in steps)
    return steps


async def test_contents_then_changes(client: ap.Client) -> None:
    """The contents with old None, then puts, changes and deletions, old and new paired."""
    table = client.table("t", str, int)
    time = await table.put_many({"b": 2, "a": 1})
    async with table.changes() as feed:
        first = await in_time(anext(feed))
        assert first.contents
        assert first.changes == [ap.Change("a", None, 1, time), ap.Change("b", None, 2, time)]
        assert first.upper == ap.Antichain(time + 1)
        later = [await table.put("a", 3), await table.delete("b"), await table.put("c", 4)]
        steps = await steps_until(feed, lambda found: len(changes_of(found)) == 3)
        assert not any(step.contents for step in steps)
        assert changes_of(steps) == [
            ap.Change("a", 1, 3, later[0]),
            ap.Change("b", 2, None, later[1]),
            ap.Change("c", None, 4, later[2]),
        ]
        assert steps[-1].upper == ap.Antichain(later[-1] + 1)
        assert feed.cursor == steps[-1].cursor


async def test_start_now(client: ap.Client) -> None:
    """Without the contents: what is put after it was entered."""
    table = client.table("t", str, int)
    await table.put("a", 1)
    async with table.changes(start="now") as feed:
        time = await table.put("a", 2)
        step = await in_time(anext(feed))
        assert step.changes == [ap.Change("a", 1, 2, time)]
        assert not step.contents


async def test_from_an_empty_table(quiet: ap.Client) -> None:
    """There are no contents; the first put comes."""
    given: dict[str, Any]
    for name, given in {"all": {}, "now": {"start": "now"}, "keys": {"keys": ["a"]}}.items():
        table = quiet.table(name, str, int)
        async with table.changes(**given) as feed:
            time = await table.put("a", 1)
            step = await in_time(anext(feed))
            assert step.changes == [ap.Change("a", None, 1, time)]


async def test_the_first_put_comes_as_it_opens(place: Place) -> None:
    """The table is empty as the feed looks, and another client puts before it listens: the put is not
    skipped."""
    async with gated(place.urls) as (client, gate):
        table, other = client.table("t", str, int), (await place.client()).table("t", str, int)
        await table
        feed = table.changes()
        gate.hold("head", late=True)  # the look has read that there is nothing
        entering = asyncio.create_task(feed.__aenter__())
        await in_time(gate.held.wait())
        await asyncio.sleep(0.01)
        time = await other.put("a", 1)
        gate.open()
        await in_time(entering)
        step = await in_time(anext(feed))
        assert step.changes == [ap.Change("a", None, 1, time)]
        await feed.aclose()


async def test_several_changes_of_a_key_in_one_interval(place: Place) -> None:
    """A feed that comes late gets each of them, in order of time, not their sum."""
    one, two = await place.client(), await place.client()
    table = one.table("t", str, int)
    await table.put("a", 0)
    async with two.table("t", str, int).changes(start="now") as feed:
        times = [
            await table.put("a", 1),
            await table.delete("a"),
            await table.put("a", 0),
            await table.put("b", 1),
        ]
        steps = await steps_until(feed, lambda found: len(changes_of(found)) >= 4)
        assert [(c.key, c.old, c.new, c.time) for c in changes_of(steps)] == [
            ("a", 0, 1, times[0]),
            ("a", 1, None, times[1]),
            ("a", None, 0, times[2]),
            ("b", None, 1, times[3]),
        ]


async def test_contents_come_in_steps(place: Place) -> None:
    """Cut by key; upper passes their time only with the last; another client goes on behind any of them."""
    client = await place.client(**SMALL)
    table = client.table("t", int, str)
    for number in range(50):
        await table.put(number, "x" * 20)
    time = (await table.view()).upper.time - 1
    async with table.changes() as feed:
        steps = await contents_of(feed)
    assert len(steps) > 3
    assert [c.key for c in changes_of(steps)] == list(range(50))
    assert [step.upper for step in steps] == [ap.Antichain(time)] * (len(steps) - 1) + [
        ap.Antichain(time + 1)
    ]
    later = await table.put(5, "new")
    await client.admin.force_compaction("t")
    for number, step in [*enumerate(steps)][:: max(1, len(steps) // 4)]:
        other = await place.client(**SMALL)
        async with other.table("t", int, str).changes(cursor=step.cursor) as feed:
            again = await steps_until(
                feed, lambda found: bool(found) and found[-1].upper > ap.Antichain(later)
            )
        rest = [c.key for s in steps[number + 1 :] for c in s.changes]
        assert [c.key for s in again if s.contents for c in s.changes] == rest
        assert changes_of(again)[-1] == ap.Change(5, "x" * 20, "new", later)


async def test_a_break_at_each_step(place: Place) -> None:
    """A break after every step, in new clients: each change comes once."""
    client = await place.client(**SMALL)
    table = client.table("t", int, int)
    for number in range(25):
        await table.put(number % 7, number)
    cursor, found = None, []
    for turn in range(12):
        async with (await place.client(**SMALL)).table("t", int, int) as other, other.changes(cursor) as feed:
            await table.put(turn % 5, 1000 + turn)
            await other.delete(turn % 4)
            step = await in_time(anext(feed))
        found += step.changes
        cursor = step.cursor
    await table.put(99, 99)
    async with table.changes(cursor) as feed:
        found += changes_of(
            await steps_until(feed, lambda steps: any(c.key == 99 for c in changes_of(steps)))
        )
    state: dict[int, int] = {}
    for change in found:
        assert state.get(change.key) == change.old
        state[change.key] = change.new
    expected = {key: val async for key, val in table.items()}
    assert {key: val for key, val in state.items() if val is not None} == expected


async def test_a_wait_that_is_cancelled_loses_nothing(place: Place) -> None:
    """Waits cut off at every turn of the loop, within the contents and behind them."""
    client = await place.client(**SMALL)
    table = client.table("t", int, int)
    await table.put_many((i, 0) for i in range(60))
    async with table.changes() as feed:
        found: list[Any] = []

        async def pull() -> None:
            found.append(await anext(feed))

        for turns in range(1, 30):
            await cancelled_after(pull(), turns)
        while not found or found[-1].upper <= ap.Antichain(found[0].changes[0].time):
            await in_time(pull())
        for number in range(1, 15):
            put = asyncio.create_task(table.put(0, number))
            await cancelled_after(pull(), number)
            await put
        while changes_of(found)[-1].new != 14:
            await in_time(pull())
    contents = [c.key for s in found if s.contents for c in s.changes]
    assert contents == list(range(60))
    assert [(c.old, c.new) for s in found if not s.contents for c in s.changes] == [
        (i, i + 1) for i in range(14)
    ]


async def test_keys(quiet: ap.Client) -> None:
    """Of these keys alone, in the contents and behind them; the position moves all the same."""
    table = quiet.table("t", str, int)
    await table.put_many({"a": 1, "b": 1, "c": 1})
    async with table.changes(keys=iter(["a", "c", "new"])) as feed:
        assert [c.key for c in (await anext(feed)).changes] == ["a", "c"]
        await table.put("b", 2)
        last = await table.put_many({"c": 3, "b": 3, "new": 1})
        steps = await steps_until(feed, lambda found: bool(changes_of(found)))
        assert changes_of(steps) == [ap.Change("c", 1, 3, last), ap.Change("new", None, 1, last)]
    async with table.changes(keys=[]) as feed:
        step = await anext(feed)
        assert (step.changes, step.contents) == ([], True)
    with pytest.raises(ap.InvalidUpdate):
        table.changes(keys=[5])


async def test_as_of(quiet: ap.Client) -> None:
    """The contents at a time or an instant, then what came after it."""
    table = quiet.table("t", str, int)
    times = [await table.put("a", number) for number in range(3)]
    at = datetime.fromtimestamp(times[1] // 10**6, UTC).replace(microsecond=times[1] % 10**6)
    for as_of in (times[1], at):
        async with table.changes(as_of=as_of) as feed:
            steps = await steps_until(feed, lambda found: len(found) == 2)
            assert changes_of(steps) == [ap.Change("a", None, 1, times[1]), ap.Change("a", 1, 2, times[2])]
    async with table.changes(as_of=times[0] - 1) as feed:
        steps = await steps_until(feed, lambda found: len(found) == 2)
        assert steps[0].contents
        assert [(c.old, c.new) for c in changes_of(steps)] == [(None, 0), (0, 1), (1, 2)]


async def test_pairs_after_a_compaction(place: Place) -> None:
    """Since moves and everything is compacted behind a feed; it goes on with pairs."""
    client = await place.client(**SMALL)
    table = client.table("t", int, int)
    await table.put_many((i, 0) for i in range(20))
    async with table.changes(start="now") as feed:
        for number in range(1, 4):
            await table.put_many((i, number) for i in range(20))
        await client.admin.retain("t", 0)
        await client.admin.force_compaction("t")
        await client.admin.force_gc("t")
        steps = await steps_until(feed, lambda found: len(changes_of(found)) == 60)
        assert [(c.old, c.new) for c in changes_of(steps)] == [
            (n, n + 1) for n in range(3) for _ in range(20)
        ]


async def test_a_cursor_within_the_contents_of_another_table(place: Place) -> None:
    """Goal: a feed or a subscription of another table takes none: it would leave out what comes before that
    key."""
    client = await place.client(**SMALL)
    one, two = client.table("one", int, str), client.table("two", int, str)
    for table in (one, two):
        for number in range(50):
            await table.put(number, "x" * 20)
    async with one.changes() as feed:
        cursor = (await contents_of(feed))[0].cursor
    async with one.changes(cursor=cursor) as feed:
        assert (await in_time(anext(feed))).contents
    assert await refused(enter(two.changes(cursor=cursor))) is ap.UsageKind.INVALID_CURSOR
    theirs = client.subscription("two", name="theirs", resume=cursor)
    assert await refused(enter(theirs)) is ap.UsageKind.INVALID_CURSOR


async def test_an_expired_cursor_raises_on_entering(place: Place) -> None:
    """A cursor within the contents and one behind them, once their history is gone."""
    client = await place.client(**SMALL)
    table = client.table("t", int, str)
    for number in range(50):
        await table.put(number, "x" * 20)
    async with table.changes() as feed:
        steps = await contents_of(feed)
    for number in range(50):
        await table.put(number, "y")
    await client.admin.retain("t", 0)
    await table.aclose()
    await client.admin.force_compaction("t")
    await client.admin.force_compaction("t")
    table = client.table("t", int, str)
    for cursor in (steps[0].cursor, steps[-1].cursor):
        with pytest.raises(ap.SinceViolation):
            async with table.changes(cursor=cursor):
                pytest.fail("it was entered")


async def test_bad_arguments(quiet: ap.Client) -> None:
    """Cursors of nothing, of other tables, and contradictions."""
    table, other = quiet.table("t", str, int), quiet.table("u", str, int)
    await table.put_many({"a": 1})
    await other.put("a", 1)
    async with table.changes() as feed:
        cursor = (await anext(feed)).cursor

    for bad in ("", "x", "contents.", "contents.äää", "contents." + cursor, "contents.AAAA", cursor[:-2]):
        assert await refused(enter(table.changes(cursor=bad))) is ap.UsageKind.INVALID_CURSOR
    assert await refused(enter(other.changes(cursor=cursor))) is ap.UsageKind.INVALID_CURSOR
    for given, kind in (
        ({"cursor": 5}, "INVALID_CURSOR"),
        ({"start": "then"}, "INVALID_TIME"),
        ({"start": 5}, "INVALID_TIME"),
        ({"start": "now", "as_of": 1}, "INVALID_CURSOR"),
        ({"cursor": cursor, "as_of": 1}, "INVALID_CURSOR"),
    ):
        with pytest.raises(ap.InvalidUsage) as caught:
            table.changes(**given)
        assert caught.value.kind.name == kind
    feed = table.changes()
    with pytest.raises(ap.InvalidUsage):
        _ = feed.cursor
    await feed.aclose()
    assert await refused(anext(feed)) is ap.UsageKind.CLOSED


async def test_a_feed_keeps_no_blobs_behind_its_contents(place: Place) -> None:
    """Once the contents were delivered, what they came from may be collected while the feed goes on."""
    client = await place.client(**SMALL)
    table = client.table("t", int, str)
    for number in range(20):
        await table.put(number, "x" * 50)
    async with table.changes() as feed:
        await contents_of(feed)
        before = await place.parts()
        for number in range(20):
            await table.put(number, "y" * 50)
        await client.admin.retain("t", 0)
        steps = await steps_until(feed, lambda found: len(changes_of(found)) == 20)
        assert len(changes_of(steps)) == 20
        waiting = asyncio.create_task(anext(feed))  # it waits for more
        await asyncio.sleep(0.01)
        for _ in range(3):
            await client.admin.force_compaction("t")
            await client.admin.force_gc("t")
        assert not before & await place.parts()
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_steps_that_begin_at_once_share_one_opening(quiet: ap.Client) -> None:
    """Goal: no step comes twice, and nothing is held once the feed is closed."""
    table = quiet.table("t", str, int)
    await table.put("k", 1)
    hold = (await table._open()).shard.hold
    before = hold._pins.total()
    feed = table.changes()
    steps = [asyncio.create_task(anext(feed)) for _ in range(2)]
    await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
    await table.put("k", 2)
    found = await in_time(asyncio.gather(*steps))
    assert [(change.old, change.new) for change in changes_of(found)] == [(None, 1), (1, 2)]
    await feed.aclose()
    assert hold._pins.total() == before


async def test_a_feed_that_is_closed_while_it_opens_holds_nothing(quiet: ap.Client) -> None:
    table = quiet.table("t", str, int)
    await table.put("k", 1)
    hold = (await table._open()).shard.hold
    before = hold._pins.total()
    feed = table.changes()
    step = asyncio.create_task(anext(feed))
    await asyncio.sleep(0)
    await feed.aclose()
    assert await refused(in_time(step)) is ap.UsageKind.CLOSED
    assert hold._pins.total() == before
